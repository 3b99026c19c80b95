"""Planted bugs in encoder outputs and the workloads that repeat them.

Must not hold anything but data: see `bugs` for what an entry is.
"""

from tests.planted.bug import Bug

LEDGER = "kvkeep/tiers/ledger.py"
ENCODER_TESTS = "tests/encoder/test_encoder.py::"

BUGS: tuple[Bug, ...] = (
    Bug(
        "ledger-takes-slots-for-pages-where-several-outputs-leave",
        LEDGER,
        "return page_ids(p for p in pages if p < self.total), page_ids(p for p in pages if p >= self.total)",
        "return pages[:-1], pages[-1:]",
        (ENCODER_TESTS + "test_many_outputs_leave_at_once",),
    ),
)
