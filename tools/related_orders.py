"""Classic eviction orders, adapted to prefix trees, on the traces of docs/eviction.md.

Must not use the product's index or orders but to check LRU: it is a second opinion on them.

    python -m tools.related_orders TRACES [--rows PART] [--orders LRU,ARC,...] [--seed N]
"""

import argparse
from pathlib import Path

from kvkeep.errors import InvariantViolation
from kvkeep.replay.formats import read_trace
from kvkeep.replay.orders import Order
from kvkeep.replay.pages import Pages
from kvkeep.replay.trace import Request
from tools.classic_orders import ORDERS
from tools.eviction_rows import K, Row, matched
from tools.prefix_pool import Tree, replay

ROWS = (
    Row("tau_retail_200", "rotate:32", None, 128, (32, 64)),
    Row("mini_swe_500", "rotate:8", None, 128, (64, 128)),
    Row("mini_swe_500", "rotate:16", None, 128, (128,)),
    Row("mini_swe_500", "recorded", None, 128, (128, 512)),
    Row("claude_code_355.jsonl.gz", "open:24", 60, 128, (128, 512, 1024)),
    Row("mooncake_conversation.jsonl.gz", "recorded", None, 512, (4096,)),
)


def related_matches(name: str, pages: Pages, requests: list[Request], capacity_pages: int, seed: int = 0) -> int:
    """Pages that the requests match with the order called `name`."""
    tree = Tree(capacity_pages, pages.distinct)
    return replay((pages.pages_of(request) for request in requests), tree, ORDERS[name](tree, seed))


def show(row: Row, folder: Path, names: list[str], seed: int) -> None:
    """A line a pool: shares of prompt tokens."""
    pages = Pages(read_trace(folder / row.trace), row.page_size)
    arrivals = Order.parse(row.order).arrivals(pages.trace, row.sessions)
    part = row.page_size / sum(request.prompt_len for request in arrivals.requests)
    for pool in (size * K for size in row.pools_k):
        shares = []
        for name in names:
            got = related_matches(name, pages, arrivals.requests, pool // row.page_size, seed)
            if name == "LRU" and got != (right := matched("lru", pages, arrivals, pool)):
                raise InvariantViolation(f"LRU matches {got} pages here and {right} in the product")
            shares.append(f"{got * part:.2%}")
        print(f"| {row.trace.split('.')[0]} | {row.order} | {pool // K}k | {' | '.join(shares)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.related_orders")
    parser.add_argument("traces", type=Path)
    parser.add_argument("--rows", default="")
    parser.add_argument("--orders", default=",".join(ORDERS))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    names = options.orders.split(",")
    print(f"| trace | order | pool | {' | '.join(names)} |\n|{'---|' * (3 + len(names))}", flush=True)
    for row in ROWS:
        if options.rows in f"{row.trace} {row.order}":
            show(row, options.traces, names, options.seed)


if __name__ == "__main__":
    main()
