"""The traces that these tests replay, and the counts that they must give."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.traces.reader import Session, read_trace

Trace = Callable[[str], list[Session]]


@pytest.fixture(scope="session")
def trace(shared_dir: Path) -> Trace:
    """Reads a trace of the reference material by name, once."""
    return cache(lambda name: read_trace(shared_dir / "traces", name))


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
