"""Do the ledgers' counts equal the owners recomputed?  For tests and idle moments.

Must not change anything.
"""

from array import array
from collections.abc import Iterable

from kvkeep.errors import InvariantViolation
from kvkeep.index.tiermap import TierMap
from kvkeep.lease import Lease
from kvkeep.tiers.ledger import Ledger
from kvkeep.traffic import Traffic


def check_owners(gpu: Ledger, host: TierMap | None, leases: Iterable[Lease], traffic: Traffic | None) -> None:
    """Raises `InvariantViolation` when a page's holders are not the leases and copies that list it.  O(pages)."""
    copies = list(traffic.copies) if traffic is not None else []
    _check("GPU", gpu, [lease.pages for lease in leases] + [copy.gpu for copy in copies])
    if host is not None:
        _check("host", host.ledger, [copy.host for copy in copies if copy.ticket is None])
    if traffic is not None:
        parked = [copy.host for copy in copies if copy.ticket is not None]
        tickets = [array("i", ticket.slots.values()) for ticket in traffic.parking.suspended]
        _check("suspension", traffic.parking.ledger, parked + tickets)


def _check(what: str, ledger: Ledger, holdings: Iterable["array[int]"]) -> None:
    ledger.check_invariants()
    counted = [0] * ledger.total
    for pages in holdings:
        for page in pages:
            counted[page] += 1
    for page, count in enumerate(counted):
        if ledger.holders(page) != count:
            raise InvariantViolation(f"{what} page {page}: {count} owners list it, the ledger: {ledger.story(page)}")
