"""LRU against rhythm as an engine hits them: the committed table is what replays give, and rhythm loses nowhere.

README.md beside this file says why an engine gains less than the reference does.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from kvkeep.replay.orders import Order
from kvkeep.replay.replaying import replay
from kvkeep.replay.result import Settings
from tests.traces.conftest import Cut

#: Rows that a minute suffices for; `python -m tools.engine_rows` makes all.
QUICK = (
    ("tau_retail_200", "rotate:32", 32768),
    ("tau_retail_200", "rotate:32", 65536),
    ("magentic_one_25", "open:12", 65536),
    ("claude_code_355", "open:24", 524288),
    ("mooncake_conversation", "recorded", 1048576),
)


@pytest.fixture(scope="session")
def table(repo_root: Path) -> dict[str, Any]:
    out: dict[str, Any] = json.loads((repo_root / "bench/results/engine_rows.json").read_text())
    return out


def test_rhythm_is_nowhere_half_a_point_below_lru(table: dict[str, Any]) -> None:
    """On any trace of the table, at any capacity from 32k to 4M tokens."""
    assert 32 == len(table["rows"])
    below = [row for row in table["rows"] if row["rhythm"]["hit_share"] < row["lru"]["hit_share"] - 0.005]
    assert [] == below


@pytest.mark.parametrize(("name", "order", "gpu_tokens"), QUICK)
def test_lru_of_the_table_is_what_a_replay_gives(
    cut: Cut, table: dict[str, Any], name: str, order: str, gpu_tokens: int
) -> None:
    """Matched pages, stalls and preemptions, exactly."""
    (row,) = (r for r in table["rows"] if (r["trace"], r["order"], r["gpu_tokens"]) == (name, order, gpu_tokens))
    pages = cut(name, row["page_size"])
    arrivals = Order.parse(order).arrivals(pages.trace, row["sessions"]).limited(table["limit"])
    counts = replay(pages, arrivals, Settings(gpu_tokens, eviction="lru")).counts
    got = {"matched_pages": counts.matched_pages_gpu, "stalls": counts.stalls, "preemptions": counts.preemptions}
    assert got.items() <= row["lru"].items() and counts.unserved == row["unserved"]
