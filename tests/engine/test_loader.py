"""Loader: the models that are read are the models that were written, and what is no model is refused in one line."""

import gzip
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from kvkeep.engine import llama2c
from kvkeep.engine.engine import Engine, EngineConfig, SamplingParams
from kvkeep.engine.loader import LoadedModel, load_model
from kvkeep.errors import BadInput

STORY_IDS = [1, 403, 407, 261, 378, 432, 383, 286, 261, 376, 298, 315, 421, 395, 317, 426]


def greedy(loaded: LoadedModel, prompt: list[int], count: int) -> list[int]:
    engine = Engine(loaded, EngineConfig(page_size=16, pool_pages=32))
    request = engine.submit(prompt, SamplingParams(max_new_tokens=count, stop_ids=loaded.eos_ids))
    engine.run()
    return request.output_ids


# --- the right model -------------------------------------------------------------------------------------------------


def test_stories_text(stories: LoadedModel, data: Path):
    """stories260K writes, from the BOS token alone, the text that llama2.c documents."""
    assert stories.tokenizer is not None
    text = stories.tokenizer.decode([1, *greedy(stories, [1], 256)])
    assert (data / "stories260K.expected.txt").read_text().strip() == text.strip()


def test_stories_tokenizer(stories: LoadedModel):
    """The tokenizer of llama2.c gives the ids of the reference, and takes them back."""
    assert stories.tokenizer is not None
    text = "Once upon a time, there was a little girl named Lily."
    assert stories.tokenizer.encode(text) == STORY_IDS
    assert stories.tokenizer.decode(STORY_IDS) == text
    assert stories.tokenizer.decode(stories.tokenizer.encode("déjà vu 漢字")) == "déjà vu 漢字"


def test_smollm2_oracle(smollm2: LoadedModel, data: Path):
    """SmolLM2 gives the first logits and the greedy ids that transformers' own attention gave."""
    expected = json.loads((data / "smollm2_expected.json").read_text())
    assert smollm2.tokenizer is not None
    assert smollm2.tokenizer.encode(expected["prompt"]) == expected["prompt_ids"]
    engine = Engine(smollm2, EngineConfig(page_size=16, pool_pages=16))
    logits: list[torch.Tensor] = []
    engine.on_forward = lambda request, start, end, row: logits.append(row) if row is not None else None
    request = engine.submit(expected["prompt_ids"], SamplingParams(max_new_tokens=40, stop_ids=smollm2.eos_ids))
    engine.run()
    best = torch.topk(logits[0], 5)
    assert best.indices.tolist() == expected["first_step_top5_ids"]
    assert best.values.tolist() == pytest.approx(expected["first_step_top5_logits"], abs=2e-3)
    assert request.output_ids == expected["greedy_ids"]
    assert request.finish_reason == "stop"
    assert smollm2.tokenizer.decode(request.output_ids) == expected["greedy_text"]


def test_smollm2_tokenizer_equals_reference(smollm2: LoadedModel, shared_dir: Path):
    """The tokenizer built from the GGUF file splits a long text as the reference tokenizer does."""
    packed = (shared_dir / "models" / "smollm2_tokenizer.json.gz").read_bytes()
    reference = Tokenizer.from_buffer(gzip.decompress(packed))
    text = (shared_dir / "design.md").read_text() + " it's 12345 déjà vu 漢字\n\n\t x  y "
    assert smollm2.tokenizer is not None
    assert reference.encode(text).ids == smollm2.tokenizer.encode(text)


# --- one model in three formats --------------------------------------------------------------------------------------


def write_gguf(path: Path, data: Path, *, quantised: bool = False, extra: dict[str, str] | None = None) -> Path:
    """stories260K as a GGUF file."""
    config, state = llama2c.read_checkpoint(data / "stories260K.bin")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, (extra or {}).get("architecture", "llama"))
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(llama2c.ROPE_THETA)
    if extra and "scaling" in extra:
        writer.add_rope_scaling_type(gguf.RopeScalingType(extra["scaling"]))
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for name, weight in state.items():
        if name == "lm_head.weight":
            continue
        for theirs, short in names.items():
            name = name.replace(f".{theirs}.", f".{short}.")
        name = name.replace("model.layers.", "blk.").replace("model.embed_tokens", "token_embd")
        name = name.replace("model.norm", "output_norm")
        if ".attn_q." in name or ".attn_k." in name:
            weight = neighbours(weight, heads if ".attn_q." in name else kv_heads)
        values = weight.numpy().astype(np.float32)
        if quantised and values.ndim == 2 and values.shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    for name in (extra or {}).get("tensors", "").split():
        writer.add_tensor(name, np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def neighbours(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The inverse of `llama2c.half_split`, written out."""
    rows, width = weight.shape
    each = rows // heads
    result = torch.empty_like(weight)
    for head in range(heads):
        for pair in range(each // 2):
            result[head * each + 2 * pair] = weight[head * each + pair]
            result[head * each + 2 * pair + 1] = weight[head * each + pair + each // 2]
    return result.reshape(rows, width).contiguous()


def test_gguf_equals_llama2c(stories: LoadedModel, data: Path, tmp_path: Path):
    """The same weights as GGUF give the same ids."""
    loaded = load_model(str(write_gguf(tmp_path / "stories.gguf", data)))
    assert greedy(loaded, STORY_IDS, 60) == greedy(stories, STORY_IDS, 60)
    assert loaded.tokenizer is None


def test_gguf_quantised(stories: LoadedModel, data: Path, tmp_path: Path):
    """A quantised GGUF is dequantised: near the same weights, not the same."""
    loaded = load_model(str(write_gguf(tmp_path / "stories.gguf", data, quantised=True)))
    ours, theirs = (m.model.model.embed_tokens.weight for m in (loaded, stories))
    assert not torch.equal(ours, theirs)
    assert torch.allclose(ours, theirs, atol=0.02)


def test_directory_equals_llama2c(stories: LoadedModel, data: Path, tmp_path: Path):
    """The same weights as a Hugging Face directory give the same ids."""
    fields, state = llama2c.read_checkpoint(data / "stories260K.bin")
    model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(state)
    model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path))
    assert greedy(loaded, STORY_IDS, 60) == greedy(stories, STORY_IDS, 60)
    assert loaded.eos_ids == (2,)


def test_half_precision_runs(data: Path):
    """bfloat16 weights load and run in fast arithmetic; pages have that dtype."""
    loaded = load_model(str(data / "stories260K.bin"), dtype="bfloat16")
    engine = Engine(loaded, EngineConfig(page_size=16, pool_pages=8, arithmetic="fast"))
    request = engine.submit(STORY_IDS, SamplingParams(max_new_tokens=8))
    engine.run()
    assert torch.bfloat16 == engine.pool.kv.dtype
    assert len(request.output_ids) == 8


def test_fingerprint(stories: LoadedModel, data: Path):
    """A fingerprint is equal across loads and differs with dtype, arithmetic and page size."""
    base = stories.fingerprint(16, "strict")
    assert base == load_model(str(data / "stories260K.bin")).fingerprint(16, "strict")
    others = {
        stories.fingerprint(32, "strict"),
        stories.fingerprint(16, "fast"),
        load_model(str(data / "stories260K.bin"), dtype="bfloat16").fingerprint(16, "strict"),
    }
    assert base not in others
    assert len(others) == 3


# --- no model --------------------------------------------------------------------------------------------------------


def refused(*args: str, **kwargs: str) -> str:
    """The message of the refusal, which must be one line."""
    with pytest.raises(BadInput) as caught:
        load_model(*args, **kwargs)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_unknown_model():
    """An unknown name is refused with the names that are known."""
    message = refused("gpt-17")
    assert "gpt-17" in message
    assert "smollm2-135m" in message


def test_wrong_device_and_dtype(data: Path):
    """A device or dtype that is not there is named."""
    path = str(data / "stories260K.bin")
    assert "tpu" in refused(path, device="tpu")
    assert "mps" in refused(path, device="mps")
    assert "int3" in refused(path, dtype="int3")
    if not torch.cuda.is_available():
        assert "no CUDA device" in refused(path, device="cuda")


@pytest.mark.parametrize("share", [0.0, 0.00001, 0.3, 0.999999])
def test_truncated_llama2c(data: Path, tmp_path: Path, share: float):
    """A llama2.c file that was cut anywhere is called truncated."""
    raw = (data / "stories260K.bin").read_bytes()
    cut = tmp_path / "cut.bin"
    cut.write_bytes(raw[: int(len(raw) * share)])
    assert "truncated" in refused(str(cut))


def test_llama2c_of_something_else(data: Path, tmp_path: Path):
    """Bytes that are no llama2.c header, a file that is too long, and a cut tokenizer are refused."""
    other = tmp_path / "other.bin"
    other.write_bytes(b"\xff" * 4096)
    assert "no llama2.c checkpoint" in refused(str(other))
    longer = tmp_path / "longer.bin"
    longer.write_bytes((data / "stories260K.bin").read_bytes() + b"1234")
    assert "too long" in refused(str(longer))
    tokenizer = tmp_path / "tok.bin"
    tokenizer.write_bytes((data / "stories260K.tok512.bin").read_bytes()[:3000])
    assert "tok.bin is truncated" in refused(str(data / "stories260K.bin"), tokenizer_path=str(tokenizer))


def test_truncated_gguf(data: Path, tmp_path: Path):
    """A GGUF file that was cut anywhere is called truncated, in one line."""
    raw = write_gguf(tmp_path / "whole.gguf", data).read_bytes()
    cut = tmp_path / "cut.gguf"
    for nbytes in (4, 7, 20, 100, 400, 1000, 3000, len(raw) // 2, len(raw) - 1):
        cut.write_bytes(raw[:nbytes])
        assert "truncated" in refused(str(cut)), nbytes


def test_gguf_of_something_else(data: Path, tmp_path: Path):
    """No GGUF, another architecture, scaled RoPE and unknown tensors are refused by name."""
    other = tmp_path / "other.gguf"
    other.write_bytes(b"not a model")
    assert "no GGUF file" in refused(str(other))
    assert "'bert'" in refused(str(write_gguf(tmp_path / "a.gguf", data, extra={"architecture": "bert"})))
    assert "scaling" in refused(str(write_gguf(tmp_path / "b.gguf", data, extra={"scaling": "yarn"})))
    assert "rope_freqs" in refused(str(write_gguf(tmp_path / "c.gguf", data, extra={"tensors": "rope_freqs.weight"})))


def test_directory_of_something_else(data: Path, tmp_path: Path):
    """A directory that holds no model, another model, or a cut file is refused."""
    assert "no config.json" in refused(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert "safetensors" in refused(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 64)
    assert "only 'llama'" in refused(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"')
    assert "no JSON" in refused(str(tmp_path))
    fields, _ = llama2c.read_checkpoint(data / "stories260K.bin")
    LlamaConfig(**fields).save_pretrained(tmp_path)
    assert "cannot be loaded" in refused(str(tmp_path))


def test_other_files(tmp_path: Path):
    """A file of another kind is refused with the kinds that are known."""
    other = tmp_path / "model.onnx"
    other.write_bytes(b"")
    assert ".gguf" in refused(str(other))
