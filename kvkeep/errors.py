"""The exceptions that kvkeep raises.

Must not know any other module of the package.
"""


class KvkeepError(Exception):
    """The world misbehaved: carries its numbers, can be handled."""


class BadInput(KvkeepError, ValueError):
    """The caller passed something that cannot be used; the message says what, where and what would be right."""


class OutOfPages(KvkeepError):
    """The pool cannot supply the pages asked for, even with every droppable cached page dropped.

    Nothing has changed when it is raised.  All numbers are pages:
    `short` are missing after everything free and droppable was counted, `in_flight` are owned by copies only,
    `held` are owned by live requests.
    """

    def __init__(self, *, asked: int, short: int, in_flight: int, held: int, total: int) -> None:
        self.asked = asked
        self.short = short
        self.in_flight = in_flight
        self.held = held
        self.total = total
        super().__init__(
            f"{asked} pages asked for, {short} short: of {total} pages {held} are held by live requests "
            f"and {in_flight} by copies in flight"
        )


class CannotSuspend(KvkeepError):
    """A request cannot be suspended now; nothing has changed.  Preempt it by recompute instead."""


class NotReady(KvkeepError):
    """Copies that this needs are still running; try again after `TieredCache.poll`."""


class NoRoomInTime(KvkeepError, TimeoutError):
    """An admission waited for pages as long as its caller allowed; its cause is the last refusal."""


class LeaseEnded(KvkeepError):
    """The lease was finished or aborted, by whoever else had it."""


class LeaseRevoked(LeaseEnded):
    """Pages that the lease waited for did not arrive, and it could not be had again; the request may be made anew."""


class ServiceClosed(LeaseEnded):
    """The service is closed, or closing: it admits nobody, and who waited waits no more."""


class EventsLost(KvkeepError):
    """Events after the number asked for are no longer kept: take a snapshot and go on from there."""


class RankLost(KvkeepError):
    """A rank of a group did not answer in time: it has died, or hangs.  The group decides nothing any more."""


class InvariantViolation(RuntimeError):
    """A bug of kvkeep's own, or a caller that broke the protocol (a double release): the program must stop."""
