"""Asks vLLM with several workers the same prompts twice, and says what came: one JSON object on the last line.

    python -m tests.integrations.vllm_parallel '{"tensor_parallel_size": 2}'

Must not know what ought to come.  A process of its own, since vLLM's workers are processes that must import this tree.
"""

import json
import sys
from typing import Any

from vllm import LLM, SamplingParams

from tests.integrations.vllm_engine import BLOCKS, engine_options, ids_of

PROMPTS = 4


def main(more: dict[str, Any]) -> None:
    llm = LLM(**engine_options(**more))
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    told: dict[str, float] = {}
    ask = scheduler.connector.get_kv_connector_stats

    def watched() -> Any:
        stats = ask()
        for name, value in (stats.data["counters"] if stats is not None else {}).items():
            told[name] = told.get(name, 0) + value
        return stats

    scheduler.connector.get_kv_connector_stats = watched
    passes = []
    for _ in range(2):
        outputs = [
            llm.generate({"prompt_token_ids": ids_of(600, n)}, params, use_tqdm=False)[0] for n in range(PROMPTS)
        ]
        passes.append([(o.num_cached_tokens, list(o.outputs[0].token_ids)) for o in outputs])
    while scheduler.has_requests():
        llm.llm_engine.step()
    side = scheduler.connector._scheduler
    side.cache.check_invariants()
    stats = side.cache.stats()
    watched()
    print(
        json.dumps(
            {
                "passes": passes,
                "counters": told,
                "ranks": scheduler.connector._ranks,
                "pages": [stats.pages_total, stats.pages_free, stats.pages_cached, stats.pages_live],
                "left": [len(side._chains), len(side._jobs), len(side._late), stats.leases],
                "blocks_free": scheduler.kv_cache_manager.block_pool.get_num_free_blocks() - (BLOCKS - 1),
            }
        )
    )
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
