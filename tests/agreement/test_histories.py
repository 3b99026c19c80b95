"""Random histories of groups whose ranks differ in free space, in what they have stored, and in how copies go."""

from collections import Counter

import pytest

from tests.agreement.histories import compare, history
from tests.agreement.threads import together

WAYS = ("minimum", "leader")


def live_through(mechanism: str, seeds: range) -> Counter[str]:
    """Lives histories with 2 to 4 ranks; what happened in all of them."""
    happened: Counter[str] = Counter()
    for seed in seeds:
        try:
            seen = together(2 + seed % 3, lambda channel, seed=seed: history(channel, mechanism, seed))  # type: ignore[misc]
        except BaseException as error:
            error.add_note(f"live_through({mechanism!r}, range({seed}, {seed + 1}))")
            raise
        compare(seen, mechanism, seed)
        for one in seen:
            happened += one.counts
    return happened


def check_happened(mechanism: str, happened: Counter[str]) -> None:
    wanted = ["refused", "revoked", "ready", "hits", "no more", "extended", "finished", "aborted", "reset"]
    wanted += ["yielded", "shortened"] * (mechanism == "minimum")
    assert [] == [what for what in wanted if not happened[what]], happened


@pytest.mark.parametrize("mechanism", WAYS)
def test_ranks_that_differ_have_equal_lengths_and_end(mechanism: str) -> None:
    """Whatever ranks have room for, lose or wait for: each decision is equal on all; a leader's page ids as well."""
    check_happened(mechanism, live_through(mechanism, range(100)))


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", WAYS)
@pytest.mark.parametrize("part", range(25))
def test_ten_thousand_histories(mechanism: str, part: int) -> None:
    """The same, 10,000 times with each mechanism."""
    check_happened(mechanism, live_through(mechanism, range(1000 + 400 * part, 1400 + 400 * part)))
