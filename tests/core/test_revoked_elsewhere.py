"""A lease that another thread's poll revokes, or shortens, while its own thread is in a call on it.

Must not use threads: the lock lets the other thread go first, at the entry that the test names.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Any

import pytest

from kvkeep.errors import LeaseRevoked
from kvkeep.lease import Lease
from tests.telemetry.rigs import TwoTiers, prompt

A = prompt(1, 3)


class AfterAnother:
    """A lock; before its entry number `at` somebody else runs `act`, once."""

    def __init__(self, lock: Any, at: int, act: Callable[[], object]) -> None:
        self._lock = lock
        self._left = at
        self._act = act

    def __enter__(self) -> None:
        self._left -= 1
        if not self._left:
            self._act()
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()


def two_that_wait() -> tuple[TwoTiers, Lease, Lease]:
    """Two leases that wait for a load of A, which fails: the next poll lets one inherit and revokes the other."""
    tiers = TwoTiers(8, 32, suspend_pages=8)
    for tokens in (A, prompt(2, 7)):
        tiers.store(tokens)
        tiers.settle()
    heir, other = tiers.cache.admit(A), tiers.cache.admit(A)
    (load,) = [job for job in tiers.backend.jobs if job.plan.cause == "promote"]
    tiers.backend.fail(load)
    return tiers, heir, other


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("name", ["extend", "seal", "truncate", "finish", "suspend"])
def test_a_call_on_a_lease_that_is_revoked_meanwhile_says_so(name: str, at: int) -> None:
    """Whenever the other thread comes first, the call takes, seals and lets go of nothing."""
    tiers, heir, other = two_that_wait()
    cache = tiers.cache
    calls: dict[str, Callable[[], object]] = {
        "extend": lambda: cache.extend(other, [7] * 4),
        "seal": lambda: cache.seal(other, 12),
        "truncate": lambda: cache.truncate(other, 3),
        "finish": lambda: cache.finish(other, 12),
        "suspend": lambda: cache.suspend(other, 12),
    }
    lock: Any = cache._lock
    cache._lock = AfterAnother(lock, at, tiers.settle)  # type: ignore[assignment]
    try:
        calls[name]()
    except LeaseRevoked:
        assert other.revoked
    except Exception:
        assert not other.revoked, "the other thread was not first"
    cache._lock = lock
    tiers.check()
    for lease in (heir, other):
        if lease.live:
            cache.abort(lease)
    tiers.settle()
    tiers.check()
    assert (0, 0) == (cache.stats().leases, cache.stats().pages_live)


def test_a_lease_that_is_revoked_meanwhile_can_be_aborted() -> None:
    """Nobody can know whether another thread has just revoked it: there is nothing left to do."""
    tiers, heir, other = two_that_wait()
    cache = tiers.cache
    lock: Any = cache._lock
    cache._lock = AfterAnother(lock, 1, tiers.settle)  # type: ignore[assignment]
    cache.abort(other)
    cache._lock = lock
    assert other.revoked
    cache.abort(other)
    cache.abort(heir)
    tiers.settle()
    tiers.check()
    assert (0, 0) == (cache.stats().leases, cache.stats().pages_live)


def test_what_a_lease_has_to_compute_since_just_now_is_not_stored() -> None:
    """It ends while its load fails elsewhere and it inherits the targets: nothing that was not computed is stored."""
    tiers, heir, other = two_that_wait()
    cache = tiers.cache
    lock: Any = cache._lock
    cache._lock = AfterAnother(lock, 2, tiers.settle)  # type: ignore[assignment]
    cache.finish(heir, 12)
    cache._lock = lock
    assert other.revoked
    tiers.settle()
    tiers.check()
    assert 0 == cache.admit(A).matched_len
