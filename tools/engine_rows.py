"""What an engine hits with LRU and with rhythm: live requests hold their pages, prompts wait, decodes grow.

Must not judge: tests/traces holds what must be reached.

    python -m tools.engine_rows TRACES [--rows PART] [--limit N] [--json FILE]

TRACES: the folder of the recorded traces.   --rows: only rows whose trace and order contain PART.
--limit: requests of each row.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from kvkeep.replay.formats import read_trace
from kvkeep.replay.orders import Order
from kvkeep.replay.pages import Pages
from kvkeep.replay.replaying import replay
from kvkeep.replay.result import Settings
from tools.eviction_rows import K, Row

ORDERS = ("lru", "rhythm")


ROWS = (
    Row("tau_retail_200", "rotate:16", None, 128, (32, 64, 128)),
    Row("tau_retail_200", "rotate:32", None, 128, (32, 64, 128)),
    Row("mini_swe_500", "rotate:8", None, 128, (64, 128, 256, 1024)),
    Row("mini_swe_500", "rotate:16", None, 128, (64, 128, 256, 1024)),
    Row("mini_swe_500", "recorded", None, 128, (128, 256, 512, 1024, 4096)),
    Row("claude_code_355.jsonl.gz", "open:8", 40, 128, (256, 1024, 4096)),
    Row("claude_code_355.jsonl.gz", "open:24", 60, 128, (512, 1024, 4096)),
    Row("magentic_one_25", "open:12", None, 128, (32, 64, 128, 256)),
    Row("mooncake_conversation.jsonl.gz", "recorded", None, 512, (256, 1024, 4096)),
)


def measured(row: Row, folder: Path, limit: int | None) -> Iterator[dict[str, object]]:
    """A row a pool: by order, what an engine matched, and what it had to wait for."""
    pages = Pages(read_trace(folder / row.trace), row.page_size)
    arrivals = Order.parse(row.order).arrivals(pages.trace, row.sessions).limited(limit)
    for pool_k in row.pools_k:
        out: dict[str, object] = {"trace": row.trace.split(".")[0], "order": row.order, "gpu_tokens": pool_k * K}
        out |= {"page_size": row.page_size, "sessions": row.sessions, "requests": len(arrivals.requests)}
        for name in ORDERS:
            result = replay(pages, arrivals, Settings(pool_k * K, eviction=name))
            counts = result.counts
            out["unserved"] = counts.unserved
            out[name] = {
                "hit_share": round(result.hit_share, 5),
                "matched_pages": counts.matched_pages_gpu,
                "stalls": counts.stalls,
                "preemptions": counts.preemptions,
            }
        yield out


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.engine_rows")
    parser.add_argument("traces", type=Path)
    parser.add_argument("--rows", default="")
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    rows = []
    print(f"{'trace':22} {'order':10} {'tokens':>8} {'LRU':>7} {'rhythm':>7}  stalls, preemptions of each")
    for row in ROWS:
        if options.rows not in f"{row.trace} {row.order}":
            continue
        for found in measured(row, options.traces, options.limit):
            rows.append(found)
            lru, rhythm = (found[name] for name in ORDERS)
            assert isinstance(lru, dict) and isinstance(rhythm, dict)
            waits = " ".join(f"{one['stalls']}, {one['preemptions']};" for one in (lru, rhythm))
            pool = f"{found['trace']:22} {found['order']:10} {found['gpu_tokens']:8}"
            print(f"{pool} {lru['hit_share']:7.2%} {rhythm['hit_share']:7.2%}  {waits}", flush=True)
    if options.json is not None:
        what = {"limit": options.limit, "rows": rows}
        options.json.write_text(json.dumps(what, indent=1) + "\n")


if __name__ == "__main__":
    main()
