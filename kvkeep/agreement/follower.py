"""Follower: applies what rank 0 has decided to the pages of this rank.  It has no index and no ledger.

Must not know tokens, names or owners: ids are the leader's, and what they are for is the leader's to know.  Here they
are only checked: that they are pages of this rank's pools, and that nothing is listed twice.
"""

import logging
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress

from kvkeep.agreement.group import GroupLease
from kvkeep.agreement.leader import apply_states, leader_settings, read_decision
from kvkeep.agreement.settings import Setting
from kvkeep.agreement.wire import Reader, Report, read_plans, reports
from kvkeep.cache import TieredCache
from kvkeep.config import check_int
from kvkeep.errors import BadInput, InvariantViolation, OutOfPages
from kvkeep.index.names import Int32s
from kvkeep.transfer.backend import NO_WAIT, After, Backend, BackendDied, Job, JobNumber, StillCopying
from kvkeep.transfer.plan import Plan

log = logging.getLogger(__name__)


class Follower:
    """The mechanism of every rank but 0, whose `Leader` decides.

    pages, host_pages: of this rank's pools; as many as the leader has.
    backend: copies between them; None where there is no host pool.
    """

    def __init__(self, page_size: int, pages: int, backend: Backend | None = None, host_pages: int = 0) -> None:
        self.cache: TieredCache | None = None
        self.always_polls = backend is not None
        self.page_size = check_int("page_size", page_size, at_least=1)
        self._pages = check_int("pages", pages, at_least=1)
        self._host_pages = check_int("host_pages", host_pages, at_least=0)
        if host_pages and backend is None:
            raise BadInput(f"a follower with {host_pages} host pages needs a backend that copies between the pools")
        self._backend = backend
        self._after: After = NO_WAIT
        self._death: str | None = None

    def settings(self, rank: int, size: int) -> Mapping[str, Setting]:
        """See `Mechanism`."""
        if size == 1:
            raise BadInput("a follower in a group of 1 rank: it must have a leader, which is rank 0")
        return leader_settings(0 if rank else None, size, self._pages, self._host_pages, self._backend)

    # ------------------------------------------------------------------ what is decided

    def offer(self, lease: GroupLease) -> bytes:
        """What has become of copies here: followers say nothing else."""
        return self._ended()

    def open(self, lease: GroupLease, said: Sequence[bytes]) -> None:
        """The block table."""
        reader = self._hear(said)
        read_decision(reader)
        table = reader.ids()
        if len(table) != lease.page_count:
            raise InvariantViolation(f"{lease}: {len(table)} pages from the leader, {lease.page_count} are needed")
        self._check(table, self._pages, str(lease))
        lease.table = table

    def report(self, waiting: Sequence[GroupLease], stream: object) -> bytes:
        """See `offer`."""
        return self._ended()

    def settle(self, waiting: Sequence[GroupLease], said: Sequence[bytes]) -> None:
        """As the leader says."""
        apply_states(waiting, self._hear(said).ids(), self.page_size)

    def grow(self, lease: GroupLease, tokens: Int32s, room: int) -> bytes:
        """See `offer`."""
        return self._ended()

    def grown(self, lease: GroupLease, said: Sequence[bytes]) -> None:
        """The pages that are added."""
        reader = self._hear(said)
        try:
            read_decision(reader)
        except OutOfPages:
            del lease.table[-(-lease.length // self.page_size) :]
            raise
        table = lease.table + reader.ids()
        self._check(table, self._pages, str(lease))
        lease.table = table

    # ------------------------------------------------------------------ ends

    def fence(self, event: After) -> None:
        """See `Mechanism`."""
        self._after = event

    def close(self, timeout_s: float) -> None:
        """See `Mechanism`."""
        if self._backend is None:
            return
        try:
            with suppress(BackendDied):
                self._backend.close(timeout_s)
        except StillCopying as error:
            log.error("%s: this rank's pools must not be freed before", error)

    # ------------------------------------------------------------------ copies

    def _hear(self, said: Sequence[bytes]) -> Reader:
        """Makes the copies that the leader ships; what it says besides."""
        reader = Reader(said[0])
        for number, plan in read_plans(reader):
            self._launch(number, plan)
        return reader

    def _launch(self, number: int, plan: Plan) -> None:
        if self._backend is None:
            raise InvariantViolation(f"{plan} from the leader, and this rank has no host pool")
        up = plan.direction == "h2d"
        sources, targets = (self._host_pages, self._pages) if up else (self._pages, self._host_pages)
        self._check(plan.sources, sources, f"sources of {plan}")
        self._check(plan.targets, targets, f"targets of {plan}")
        for slot in plan.slots:
            self._check(array("i", (slot.source,)), sources, str(slot))
            self._check(array("i", (slot.target,)), targets, str(slot))
        job = Job(JobNumber(number), plan, self._after, plan.nbytes(self._backend.page_nbytes), float("inf"))
        try:
            self._backend.launch(job)
        except BackendDied as death:
            self._death = str(death)

    def _ended(self) -> bytes:
        ended: list[Report] = []
        if self._backend is not None:
            try:
                ended = [Report(o.job.number, o.error, o.copy_ns) for o in self._backend.completions()]
            except BackendDied as death:
                self._death = str(death)
        return reports(ended, self._death)

    @staticmethod
    def _check(pages: "array[int]", count: int, what: str) -> None:
        if len(pages) and not 0 <= min(pages) <= max(pages) < count:
            wrong = next(page for page in pages if not 0 <= page < count)
            raise InvariantViolation(f"{what}: page {wrong}, and this rank has pages 0 to {count - 1}")
        if len(set(pages)) < len(pages):
            raise InvariantViolation(f"{what}: a page is listed twice")
