"""The ledger's tracing twin: it knows every owner by name, and where each one came from.

Must not be used outside tests and debugging: it costs microseconds a page.
"""

import traceback
from array import array
from collections import Counter

from kvkeep.errors import InvariantViolation
from kvkeep.tiers.ledger import INDEX, Ledger, State, page_ids


class TracingLedger(Ledger):
    """A `Ledger` that also keeps `owners[page]`, a count of owners by label, and where each owner acquired it.

    It refuses what counts alone cannot see: a page twice in one batch, a release by somebody who is no owner,
    and a page that has left the index by another way than `drop` or `recycle`.
    """

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self.owners: list[Counter[object]] = [Counter() for _ in range(total)]
        self._since: list[dict[object, str]] = [{} for _ in range(total)]

    def open(self, count: int, owner: object) -> "array[int]":
        pages = super().open(count, owner)
        self._acquire(pages, owner)
        return pages

    def open_slot(self, nbytes: int, owner: object) -> int | None:
        slot = super().open_slot(nbytes, owner)
        if slot is not None:
            self._acquire(page_ids((slot,)), owner)
        return slot

    def _grow(self, count: int) -> None:
        super()._grow(count)
        self.owners += [Counter() for _ in range(count)]
        self._since += [{} for _ in range(count)]

    def seal(self, pages: "array[int]", owner: object) -> None:
        self._distinct(pages)
        for p in pages:
            others = [who for who in self.owners[p] if who != owner]  # a copy that the owner's stream comes after
            if not self.owners[p][owner] or INDEX in others or len(others) > 1:
                raise InvariantViolation(f"page {p} sealed by {owner!r}: {self.story(p)}")
        super().seal(pages, owner)

    def retain(self, pages: "array[int]", owner: object) -> None:
        self._distinct(pages)
        super().retain(pages, owner)
        self._acquire(pages, owner)

    def release(self, pages: "array[int]", owner: object) -> int:
        self._distinct(pages)
        for p in pages:
            if not self.owners[p][owner]:
                raise InvariantViolation(f"page {p} released by {owner!r}, who is no owner: {self.story(p)}")
        freed = super().release(pages, owner)
        self._lose(pages, owner)
        return freed

    def keep(self, pages: "array[int]") -> None:
        self._distinct(pages)
        super().keep(pages)
        self._acquire(pages, INDEX)

    def drop(self, pages: "array[int]") -> int:
        self._distinct(pages)
        freed = super().drop(pages)
        self._lose(pages, INDEX)
        return freed

    def recycle(self, pages: "array[int]", owner: object) -> None:
        self._distinct(pages)
        super().recycle(pages, owner)
        self._lose(pages, INDEX)
        self._acquire(pages, owner)

    def land(self, pages: "array[int]", copy: object) -> int:
        self._distinct(pages)
        return super().land(pages, copy)

    def unload(self, pages: "array[int]", copy: object) -> None:
        self._distinct(pages)
        super().unload(pages, copy)

    def hand_over(self, pages: "array[int]", copy: object) -> int:
        self._distinct(pages)
        return super().hand_over(pages, copy)

    def drain(self, pages: "array[int]", heir: object) -> None:
        self._distinct(pages)
        super().drain(pages, heir)
        self._lose(pages, INDEX)
        self._acquire(pages, heir)

    def follow(self, pages: "array[int]") -> None:
        self._distinct(pages)
        super().follow(pages)

    def story(self, page: int) -> str:
        lines = [f"{who!r} x{n} since {self._since[page].get(who, '?')}" for who, n in self.owners[page].items()]
        return super().story(page) + "; owners: " + ("; ".join(lines) or "none")

    def check_invariants(self) -> None:
        super().check_invariants()
        for p, owners in enumerate(self.owners):
            kept = owners[INDEX]
            holders = sum(owners.values()) - kept
            if kept > 1 or self.kept(p) != bool(kept) or self.holders(p) != holders:
                raise InvariantViolation(f"page {p}: counts differ from its owners: {self.story(p)}")
            if self.state(p) is State.FREE and owners.total():
                raise InvariantViolation(f"page {p} is free and owned: {self.story(p)}")

    def _acquire(self, pages: "array[int]", owner: object) -> None:
        site = traceback.extract_stack(limit=6)
        where = " < ".join(f"{f.name}:{f.lineno}" for f in reversed(site[:-2]))
        for p in pages:
            self.owners[p][owner] += 1
            self._since[p].setdefault(owner, where)

    def _lose(self, pages: "array[int]", owner: object) -> None:
        for p in pages:
            self.owners[p][owner] -= 1
            if not self.owners[p][owner]:
                del self.owners[p][owner]
                self._since[p].pop(owner, None)

    def _distinct(self, pages: "array[int]") -> None:
        if len(set(pages)) != len(pages):
            twice = next(p for p, n in Counter(pages).items() if n > 1)
            raise InvariantViolation(f"page {twice} is twice in one batch: {self.story(twice)}")
