"""The proxy before clients and replicas that mean ill, or are ill: nothing is passed on that should not be, nothing
leaks, and nobody is blamed for what another did.

Must not measure time.
"""

import asyncio
import errno
import json
import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import aiohttp
import pytest

from kvkeep.proxy import intake, protocol, replicas
from kvkeep.proxy.app import Proxy
from tests.proxy.rigs import Nonsense, Stub, chat, connect, post, served, until

pytestmark = pytest.mark.asyncio


# ---------------------------------------------------------------------- what replicas answer


@pytest.mark.parametrize(
    "says",
    [
        b"HTTP/1.1 999 No\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 099 No\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-A: a\x01b\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok!",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X-A: " + b"a" * 100_000 + b"\r\n\r\n",
        b"\x16\x03\x01\x00\x00",
        b"HTTP/1.1 103 Early Hints\r\n\r\n",
    ],
)
async def test_an_answer_that_none_may_give_is_said_to_be_the_replicas(says: bytes, session: aiohttp.ClientSession):
    """502 with an error that names the replica, instead of something that looks like the proxy's own failure."""
    nonsense = Nonsense(says)
    await nonsense.start()
    async with served(Proxy([nonsense.url])) as url:
        status, told = await post(session, url, chat("s", "hi"))
    await nonsense.stop()
    assert (502, "bad_replica") == (status, told["error"]["type"]), told
    assert nonsense.url in told["error"]["message"] and 1 == nonsense.asked


async def test_an_answer_without_a_body_leaves_the_connection_whole():
    """304 and 204 may say a length of what does not come: the client's next request is answered all the same."""
    for status in (b"304 Not Modified", b"204 No Content"):
        nonsense = Nonsense(b"HTTP/1.1 " + status + b"\r\nContent-Length: 9\r\nETag: x\r\n\r\n")
        await nonsense.start()
        async with served(Proxy([nonsense.url])) as url, connect(url) as (reader, writer):
            for _ in range(2):
                writer.write(b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
                assert head.startswith(b"HTTP/1.1 " + status[:3]) and b"etag: x\r\n" in head
        await nonsense.stop()


async def test_what_breaks_everywhere_leaves_most_replicas_in(
    session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
):
    """Requests that every replica breaks on leave out half of them at most, and never the only one."""
    monkeypatch.setattr(replicas, "OUT_MIN_S", 30.0)
    for count, left in ((1, 1), (2, 1), (3, 2), (4, 2)):
        broken = [Nonsense(b"") for _ in range(count)]
        for one in broken:
            await one.start()
        proxy = Proxy([one.url for one in broken])
        async with served(proxy) as url:
            for number in range(30):
                assert 502 == (await post(session, url, chat(f"{number}" * 999, "hi")))[0]
            assert left == len(proxy.router.replicas)
        for one in broken:
            await one.stop()


async def test_a_look_at_a_replica_takes_little_and_leads_nowhere(stubs: list[Stub]):
    """An answer to /health that does not end is not read to its end, and one that points elsewhere is no good one."""
    endless, pointing = Nonsense(b""), Nonsense(b"")
    endless.health = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n" + b"x" * 50_000_000
    there = stubs[0].url.encode() + b"/there"
    pointing.health = b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: " + there + b"\r\n\r\n"
    for one in (endless, pointing):
        await one.start()
    proxy = Proxy([endless.url, pointing.url])
    async with served(proxy):
        await until(lambda: not proxy.replicas.by_id[pointing.url].alive)
        await until(lambda: endless.unsent > 0)
    assert "/health answered 302" == proxy.replicas.by_id[pointing.url].why
    assert not stubs[0].requests
    for one in (endless, pointing):
        await one.stop()


async def test_a_replica_that_speaks_no_tls_is_named_so(stubs: list[Stub], session: aiohttp.ClientSession):
    """Its error number is no error of the system."""
    async with served(Proxy([stubs[0].url.replace("http:", "https:")])) as url:
        status, told = await post(session, url, chat("s", "hi"))
    assert 503 == status and "it cannot be reached (TLS: " in told["error"]["message"]


async def test_connections_are_asked_whether_they_live(url: str, stubs: list[Stub], session: aiohttp.ClientSession):
    """A machine that vanishes without a word, before or behind the proxy, ends its connection, which else stays."""
    for stub in stubs:
        stub.gate.clear()
    async with session.post(f"{url}/v1/completions", data=b'{"prompt": "hi", "stream": true}') as answer:
        await answer.content.readany()
        (busy,) = [stub for stub in stubs if stub.requests]
        await until(lambda: {"02"} == timers(OTHER, busy.port) == timers(OWN, int(url.rpartition(":")[2])))
        busy.gate.set()


OWN, OTHER = 1, 2


def timers(end: int, port: int) -> set[str]:
    """What Linux waits for on connections with this port at one end; 02: to ask whether the other one lives."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {line[5][:2] for line in lines if line[3] == "01" and int(line[end].rpartition(":")[2], 16) == port}


# ---------------------------------------------------------------------- what clients send


async def test_what_is_behind_a_body_is_no_header(url: str, stubs: list[Stub]):
    """Fields behind a chunked body are not passed on as headers, where nobody before this proxy has looked at them."""
    async with connect(url) as (reader, writer):
        writer.write(
            b"POST /v1/models HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nX-First: 1\r\n\r\n"
            b"2\r\n{}\r\n0\r\nAuthorization: Bearer stolen\r\nContent-Encoding: gzip\r\nX-Late: 1\r\nX-Last: 1\r\n\r\n"
        )
        assert b"200" in await asyncio.wait_for(reader.readline(), 10)
    ((_, _, headers, body),) = [request for stub in stubs for request in stub.requests]
    assert b"{}" == body and "1" == headers["X-First"]
    assert not {"Authorization", "Content-Encoding", "X-Late", "X-Last", "Transfer-Encoding"} & set(headers)


async def test_a_chunked_body_is_routed_as_any(url: str, stubs: list[Stub], session: aiohttp.ClientSession):
    """It arrives whole, with its length, at the replica that its prompt asks for."""
    body = json.dumps(chat("s" * 3_000, "hi")).encode()

    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 700):
            yield body[at : at + 700]

    for data in (body, chunks()):
        async with session.post(f"{url}/v1/chat/completions", data=data) as answer:
            assert 200 == answer.status
    (both,) = [stub.requests for stub in stubs if stub.requests]
    assert [body, body] == [arrived for *_, arrived in both]
    assert [str(len(body))] * 2 == [headers["Content-Length"] for _, _, headers, _ in both]


async def test_headers_pass_as_bytes(url: str, stubs: list[Stub]):
    """What is UTF-8 in a header stays so; a key for this proxy alone goes no further."""
    async with connect(url) as (reader, writer):
        writer.write(
            "GET /v1/models HTTP/1.1\r\nHost: a\r\nX-Name: Jürgen\r\nProxy-Authorization: Basic eA==\r\n\r\n".encode()
        )
        assert b"200" in await asyncio.wait_for(reader.readline(), 10)
    ((_, _, headers, _),) = [request for stub in stubs for request in stub.requests]
    assert "Jürgen" == headers["X-Name"] and "Proxy-Authorization" not in headers


async def test_a_head_that_does_not_end_is_refused(url: str):
    """It would fill the memory: in one header, in many, and in the line before them."""
    most = protocol.HEAD_NBYTES_MAX
    begun = b"GET / HTTP/1.1\r\n"
    for sent in (begun + b"X-A: " + b"a" * most * 8, begun + b"X-A: a\r\n" * most, b"GET /" + b"a" * most * 8):
        async with connect(url) as (reader, writer):
            writer.write(sent)
            try:
                line = await asyncio.wait_for(reader.readline(), 10)
            except ConnectionError:
                line = b""  # what was not read has made the system forget the answer
            assert line in (b"", b"HTTP/1.1 400 Bad Request\r\n")


async def test_many_requests_in_one_piece_are_no_large_head(url: str):
    """What is counted is one request's head, however many come at once."""
    one = b"GET /health HTTP/1.1\r\nHost: a\r\nX-A: " + b"a" * 8_000 + b"\r\n\r\n"
    async with connect(url) as (reader, writer):
        writer.write(one * 60)
        for _ in range(60):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
            assert head.startswith(b"HTTP/1.1 200")
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))


async def test_a_body_that_is_said_to_be_too_large_is_not_asked_for(url: str):
    """A client that waits to be told to go on is refused before it sends anything."""
    async with connect(url) as (reader, writer):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\n"
        writer.write(head + b"Content-Length: 999999999\r\n\r\n")
        assert b" 413 " in await asyncio.wait_for(reader.readline(), 10)


async def test_bodies_together_have_a_limit(
    url: str, proxy: Proxy, stubs: list[Stub], session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
):
    """What does not fit beside those that are held is told to come again, and fits when they have ended."""
    monkeypatch.setattr(intake, "BODIES_NBYTES_MAX", 10_000)
    for stub in stubs:
        stub.gate.clear()
    first = asyncio.create_task(post(session, url, {"prompt": "a" * 6_000}, "/v1/completions"))
    await until(lambda: any(stub.requests for stub in stubs))
    second = json.dumps({"prompt": "b" * 6_000})
    async with asyncio.timeout(10), session.post(f"{url}/v1/completions", data=second) as answer:
        assert 503 == answer.status and "1" == answer.headers["Retry-After"]
        assert "no_room" == (await answer.json())["error"]["type"]
    for stub in stubs:
        stub.gate.set()
    assert 200 == (await first)[0]
    assert 200 == (await post(session, url, {"prompt": "b" * 6_000}, "/v1/completions"))[0]


async def test_clients_that_leave_anywhere_leave_nothing_behind(url: str, proxy: Proxy, stubs: list[Stub]):
    """In the head, in the body, before the answer, in the middle of it: no connection stays, no byte and no request is
    counted on."""
    body = b'{"prompt": "hi", "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
    for stub in stubs:
        stub.gate.clear()
    before = len(os.listdir("/proc/self/fd"))
    for sent in (head[:20], head + body[:9], head + body):
        for _ in range(20):
            async with connect(url) as (reader, writer):
                writer.write(sent)
                if sent.endswith(body):
                    await reader.readuntil(b"data: first")
                else:
                    await asyncio.sleep(0.01)
                writer.transport.abort()
    await until(lambda: 0 == proxy._intake.nbytes == sum(proxy.router.loads.values()))
    assert 20 == sum(len(stub.requests) for stub in stubs)
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before + 2 * len(stubs))


# ---------------------------------------------------------------------- the machine itself


async def test_no_room_here_is_not_the_replicas_fault(proxy: Proxy, url: str, stubs: list[Stub]):
    """Where this process can open no more connections a request is told to come again; no replica is left out."""
    for stub in stubs:
        stub.gate.clear()  # connections that were there before stay busy
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connect(url)) for _ in range(12)]
        with no_more_files():
            for _, writer in clients:
                writer.write(b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
            lines = [asyncio.create_task(reader.readuntil(b"}}")) for reader, _ in clients]
            done, _ = await asyncio.wait(lines, timeout=10, return_when=asyncio.FIRST_COMPLETED)
            told = [await line for line in done]
            await asyncio.sleep(2.5 * replicas.CHECK_EVERY_S)
            assert {stub.url for stub in stubs} == set(proxy.router.replicas)
        for line in lines:
            line.cancel()
        await asyncio.gather(*lines, return_exceptions=True)
    assert told and all(b" 503 " in one and b"no_room" in one for one in told)
    assert all(os.strerror(errno.EMFILE).encode() in one for one in told)


@contextmanager
def no_more_files() -> Iterator[None]:
    """Every file that this process may have is open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        with socket.socket() as one:
            while True:
                try:
                    taken.append(os.dup(one.fileno()))
                except OSError:
                    break
            yield
    finally:
        for number in taken:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_what_has_no_prompt_is_spread(url: str, stubs: list[Stub], session: aiohttp.ClientSession):
    """Where all are idle they take turns, and a replica that could not be reached is not said to have been asked."""
    for _ in range(6):
        async with session.get(f"{url}/v1/models") as answer:
            assert 200 == answer.status
    assert [2, 2, 2] == [len(stub.requests) for stub in stubs]
    await stubs[0].stop()
    for _ in range(4):
        async with session.get(f"{url}/v1/models") as answer:
            assert 200 == answer.status
    async with session.get(f"{url}/health") as health:
        told = (await health.json())["replicas"]
    assert [2, 4, 4] == [told[stub.url]["routed"] for stub in stubs]
