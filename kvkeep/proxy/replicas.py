"""The replicas behind the proxy: who is alive, by asking each now and then and by what requests meet.

Must not know prompts.
"""

import asyncio
import errno
import logging
import os
import ssl
import time
from dataclasses import dataclass

import aiohttp
from yarl import URL

from kvkeep.errors import BadInput
from kvkeep.routing.router import Router

log = logging.getLogger(__name__)

#: Seconds between two looks at a replica, and how long one may take.
CHECK_EVERY_S, CHECK_MAX_S = 1.0, 2.0
#: Looks, or requests, in a row that must fail before a replica is left out.
FAILURES_MAX = 2
#: Of the replicas, those that must stay whatever requests meet: what breaks everywhere is the request, not the replica.
KEPT_MIN = 0.5
#: Seconds that a replica is left out at least; twice as long each time, until it answers a request.
OUT_MIN_S, OUT_MAX_S = 1.0, 60.0
HEALTH = "/health"
#: Of an answer to it, as much as is read, so that the connection can be used again.
HEALTH_NBYTES_MAX = 65_536

#: Errors that say that this machine has no room for another connection, and nothing of the replica.
OURS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


@dataclass(slots=True)
class Replica:
    """One of them.

    routed: requests that went there.   why: what was last found wrong, or empty.
    looks, requests: that failed in a row.   times: that it was left out since it last answered a request.
    back_s: not before this time is it asked again.
    """

    alive: bool = True
    routed: int = 0
    why: str = ""
    looks: int = 0
    requests: int = 0
    times: int = 0
    back_s: float = 0.0


def parse_address(text: str) -> str:
    """A replica's address without a slash at its end; `BadInput` when it is none."""
    try:
        url = URL(text)
        good = url.scheme in ("http", "https") and bool(url.host) and not (url.query_string or url.fragment)
        good = good and "@" not in url.authority  # clients' own keys are passed on
    except ValueError:
        good = False
    if not good:
        raise BadInput(f"--replica {text}: it must be an address such as http://10.0.0.1:8000, without a user's name")
    return str(url).rstrip("/")


def why_not(error: aiohttp.ClientConnectorError) -> str:
    """Why there is no connection, in the system's words."""
    if isinstance(error.os_error, ssl.SSLError):  # its numbers are not the system's
        return f"TLS: {error.os_error.reason or error.os_error}"
    number = error.os_error.errno or 0
    return os.strerror(number) if number > 0 else str(error.os_error.strerror or error)


def is_ours(error: aiohttp.ClientConnectorError) -> bool:
    """Whether it says nothing of the replica."""
    return error.os_error.errno in OURS


class Replicas:
    """Replicas by id, which is their address as text; those that are alive are in the router."""

    def __init__(self, router: Router) -> None:
        self.by_id = {replica: Replica() for replica in router.replicas}
        self._router = router

    def unreachable(self, replica_id: str, why: str) -> None:
        """No connection can be made: it is left out at once."""
        self._leave(replica_id, f"it cannot be reached ({why})")

    def broke(self, replica_id: str, why: str) -> None:
        """It took a request, and gave no whole answer.  Leaves it out only while enough are left."""
        replica = self.by_id[replica_id]
        replica.requests += 1
        replica.why = why
        left = len(self._router.replicas) - 1
        if replica.requests >= FAILURES_MAX and left >= KEPT_MIN * len(self.by_id):
            self._leave(replica_id, why)

    def answered(self, replica_id: str) -> None:
        """It took a request and answered."""
        replica = self.by_id[replica_id]
        replica.requests = replica.times = 0

    def _looked_ill(self, replica_id: str, why: str) -> None:
        replica = self.by_id[replica_id]
        replica.looks += 1
        replica.why = why
        if replica.looks >= FAILURES_MAX:
            self._leave(replica_id, why)

    def _looked_well(self, replica_id: str) -> None:
        replica = self.by_id[replica_id]
        replica.looks = 0
        if not replica.alive and time.monotonic() >= replica.back_s:
            replica.alive, replica.why = True, ""
            self._router.join(replica_id)
            log.warning("replica %s is back", replica_id)

    def _leave(self, replica_id: str, why: str) -> None:
        replica = self.by_id[replica_id]
        replica.why = why
        if replica.alive:
            replica.alive = False
            replica.back_s = time.monotonic() + min(OUT_MAX_S, OUT_MIN_S * 2**replica.times)
            replica.times += 1
            self._router.leave(replica_id)
            log.warning("replica %s is left out: %s", replica_id, why)

    async def watch(self, session: aiohttp.ClientSession) -> None:
        """Looks at all of them, for ever."""
        while True:
            await asyncio.gather(*(self._look(session, replica_id) for replica_id in self.by_id))
            await asyncio.sleep(CHECK_EVERY_S)

    async def _look(self, session: aiohttp.ClientSession, replica_id: str) -> None:
        limit = aiohttp.ClientTimeout(total=CHECK_MAX_S)
        try:
            async with session.get(replica_id + HEALTH, timeout=limit, allow_redirects=False) as answer:
                status = answer.status
                await answer.content.read(HEALTH_NBYTES_MAX)
        except aiohttp.ClientConnectorError as error:
            if not is_ours(error):
                self.unreachable(replica_id, why_not(error))
        except Exception as error:  # whatever it does: the others are looked at for ever
            self._looked_ill(replica_id, f"{HEALTH} got no answer ({type(error).__name__})")
        else:
            if 200 <= status < 300:
                self._looked_well(replica_id)
            else:
                self._looked_ill(replica_id, f"{HEALTH} answered {status}")
