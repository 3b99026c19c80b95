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
        'if not pages or max(pages) < self.total:',
        'if not pages or pages[-1] < self.total:',
        (ENCODER_TESTS + "test_many_outputs_leave_at_once",),
    ),
)
