"""The traces that these tests replay, and the counts that they must give."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvkeep.replay.formats import read_trace
from kvkeep.replay.pages import Pages

#: Reads a trace of the reference material by name and cuts it into pages of a size, each once.
Cut = Callable[[str, int], Pages]

BLOCK_TRACES = ("claude_code_355", "mooncake_conversation")


@pytest.fixture(scope="session")
def cut(shared_dir: Path) -> Cut:
    def trace_path(name: str) -> Path:
        return shared_dir / "traces" / (f"{name}.jsonl.gz" if name in BLOCK_TRACES else name)

    read = cache(lambda name: read_trace(trace_path(name)))
    return cache(lambda name, page_size: Pages(read(name), page_size))


@pytest.fixture(scope="session")
def expected_reuse(shared_dir: Path) -> dict[str, list[dict[str, Any]]]:
    """The counts of the reference material: by trace, a list of orders, page sizes and what is stored."""
    results: dict[str, list[dict[str, Any]]] = json.loads((shared_dir / "traces/expected_reuse.json").read_text())[
        "results"
    ]
    return results


@pytest.fixture(scope="session")
def own_counts() -> dict[str, Any]:
    """Counts of a real pool, committed beside these tests; README.md explains how they differ."""
    counts: dict[str, Any] = json.loads(Path(__file__).with_name("engine_counts.json").read_text())
    return counts
