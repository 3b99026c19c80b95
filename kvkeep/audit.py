"""Do the ledgers' counts equal the owners recomputed?  For tests and idle moments.

Must not change anything.
"""

from array import array
from collections import Counter
from collections.abc import Iterable
from itertools import chain

from kvkeep.errors import InvariantViolation
from kvkeep.index.tiermap import TierMap
from kvkeep.lease import Lease
from kvkeep.tiers.ledger import Ledger, State
from kvkeep.traffic import Traffic


def check_owners(gpu: Ledger, host: TierMap | None, leases: Iterable[Lease], traffic: Traffic | None) -> None:
    """Raises `InvariantViolation` when a page's holders are not the leases and copies that list it.  O(pages)."""
    copies = list(traffic.copies) if traffic is not None else []
    held = [lease.pages for lease in leases]
    _check("GPU", gpu, held + [copy.gpu for copy in copies])
    for page, count in Counter(chain(*held)).items():
        if count > 1 and gpu.state(page) is State.OPEN:
            raise InvariantViolation(f"GPU page {page}: {count} requests may write it: {gpu.story(page)}")
    if host is not None:
        _check("host", host.ledger, [copy.host for copy in copies if copy.ticket is None])
    if traffic is not None:
        parked = [copy.host for copy in copies if copy.ticket is not None]
        tickets = [array("i", ticket.slots.values()) for ticket in traffic.parking.suspended]
        _check("suspension", traffic.parking.ledger, parked + tickets)


def _check(what: str, ledger: Ledger, holdings: Iterable["array[int]"]) -> None:
    ledger.check_invariants()
    counted = [0] * ledger.ids
    for pages in [*holdings, ledger.slots.pages if ledger.slots is not None else ()]:
        for page in pages:
            counted[page] += 1
    for page, count in enumerate(counted):
        if ledger.holders(page) != count:
            raise InvariantViolation(f"{what} page {page}: {count} owners list it, the ledger: {ledger.story(page)}")
