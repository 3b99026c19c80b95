"""The proxy before real servers: what is passed on, what is tried again, what is refused, who is left out.

Must not measure time: see `bench/routing.py`.
"""

import asyncio
import gzip
import json
from collections import Counter

import aiohttp
import pytest
from yarl import URL

from kvkeep.errors import BadInput
from kvkeep.proxy import intake, replicas
from kvkeep.proxy.app import Proxy
from kvkeep.routing import Guard, RoutingSettings
from tests.proxy.rigs import Nonsense, Stub, chat, post, served, until

pytestmark = pytest.mark.asyncio

LONG = "You are careful. " * 100


async def test_a_session_meets_on_one_replica(url: str, session: aiohttp.ClientSession):
    """All turns of a session go where the first went; sessions are spread, behind one system prompt too."""
    where: list[set[int]] = []
    for number in range(40):
        turns: list[str] = [LONG, f"question {number} " * 50]
        ports = set()
        for _ in range(3):
            status, told = await post(session, url, chat(*turns))
            assert 200 == status
            ports.add(told["port"])
            turns += ["answer " * 60, "and then? "]
        where.append(ports)
    assert {1} == {len(ports) for ports in where[8:]}
    assert 3 == len(set().union(*where[8:]))


async def test_requests_arrive_as_they_were_sent(url: str, stubs: list[Stub], session: aiohttp.ClientSession):
    """Method, path, query, headers and body; what belongs to the connection is not passed on."""
    body = json.dumps(chat("s" * 600, "hi")).encode()
    target = URL(f"{url}/v1/chat/completions?a=%2F&b", encoded=True)
    headers = {"Authorization": "Bearer k", "X-Two": "a", "Connection": "keep-alive, X-Hop", "X-Hop": "1"}
    async with session.post(target, data=body, headers=headers) as answer:
        told = await answer.json()
    (request,) = [request for stub in stubs for request in stub.requests]
    method, path, got, arrived = request
    assert ("POST", "/v1/chat/completions?a=%2F&b", body) == (method, path, arrived)
    assert ("Bearer k", "a", str(len(body))) == (got["Authorization"], got["X-Two"], got["Content-Length"])
    assert "X-Hop" not in got and "127.0.0.1" == got["X-Forwarded-For"]
    assert "kept" == answer.headers["X-Own"] and path == told["path"]
    assert answer.headers["X-Kvkeep-Replica"] == f"http://127.0.0.1:{told['port']}"


async def test_other_paths_go_to_whoever_is_least_busy(url: str, stubs: list[Stub], session: aiohttp.ClientSession):
    """What has no prompt is passed on all the same, and spread by load."""
    for stub in stubs:
        stub.gate.clear()
    asked = [asyncio.create_task(session.get(f"{url}/v1/models")) for _ in range(9)]
    await until(lambda: 9 == sum(len(stub.requests) for stub in stubs))
    assert {3} == {len(stub.requests) for stub in stubs}
    for stub in stubs:
        stub.gate.set()
    assert {200} == {(await one).status for one in asked}


async def test_a_stream_is_not_buffered(url: str, stubs: list[Stub], session: aiohttp.ClientSession):
    """The first piece is read before the replica has written the second, and the request waits no more by then."""
    for stub in stubs:
        stub.gate.clear()
    body = b'{"prompt": "hi", "stream": true}'
    async with asyncio.timeout(15), session.post(f"{url}/v1/completions", data=body) as answer:
        assert "text/event-stream" == answer.headers["Content-Type"]
        assert b"data: first\n\n" == await answer.content.readany()
        (busy,) = [stub for stub in stubs if stub.requests]
        async with session.get(f"{url}/health") as health:
            assert 0 == (await health.json())["replicas"][busy.url]["waiting"]
        busy.gate.set()
        assert b"data: 0\n\ndata: 1\n\ndata: 2\n\n" == await answer.content.read()


async def test_a_client_that_leaves_stops_the_replica(url: str, stubs: list[Stub], session: aiohttp.ClientSession):
    """Before the first piece and in the middle of a stream: its connection is closed, and nothing is counted."""
    for stub in stubs:
        stub.gate.clear()
    for stream in (False, True):
        body = json.dumps({"prompt": f"{stream}", "stream": stream})
        task = asyncio.create_task(session.post(f"{url}/v1/completions", data=body))
        await until(lambda: any(stub.requests for stub in stubs))
        (busy,) = [stub for stub in stubs if stub.requests]
        if stream:
            (await task).close()
        else:
            task.cancel()
        async with asyncio.timeout(10):
            await busy.gone.wait()
        busy.requests.clear()
        busy.gone.clear()
        await until_idle(session, url)


async def test_a_dead_replica_is_passed_over(url: str, proxy: Proxy, stubs: list[Stub], session: aiohttp.ClientSession):
    """A connection that is refused is tried on the next replica; the dead one is left out; when it is back, so are
    its prompts, and no other prompt has moved."""
    before = await ports(session, url)
    gone = stubs[0]
    await gone.stop()
    during = await ports(session, url)
    assert gone.port not in during
    assert [a for a in before if a != gone.port] == [b for a, b in zip(before, during, strict=True) if a != gone.port]
    assert not proxy.replicas.by_id[gone.url].alive
    await gone.start()
    await until(lambda: proxy.replicas.by_id[gone.url].alive)
    assert before == await ports(session, url)


async def test_a_request_that_was_sent_is_not_sent_again(stubs: list[Stub], session: aiohttp.ClientSession):
    """A replica that takes it and closes the connection, or answers garbage, or half of an answer: an error that names
    the replica (or an answer that visibly ends early), and no other replica sees the request."""
    for says in (b"", b"certainly! here is\r\n\r\n", b"HTTP/1.1 20x maybe\r\n\r\n"):
        nonsense = Nonsense(says)
        await nonsense.start()
        proxy = Proxy([nonsense.url, stubs[0].url])
        async with served(proxy) as url:
            told = [await post(session, url, chat(f"{number}" * 999, "hi")) for number in range(8)]
        await nonsense.stop()
        bad = [answer["error"] for status, answer in told if status == 502]
        assert nonsense.asked == len(bad) > 0 and len(bad) + len(stubs[0].requests) == 8
        assert all(nonsense.url in error["message"] and "bad_replica" == error["type"] for error in bad)
        stubs[0].requests.clear()


async def test_half_an_answer_is_seen_to_be_half(session: aiohttp.ClientSession):
    """The client's connection ends as the replica's did: what was cut short does not look whole."""
    for head in (b"Content-Length: 100", b"Transfer-Encoding: chunked"):
        nonsense = Nonsense(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n5\r\nhello\r\n")
        await nonsense.start()
        async with served(Proxy([nonsense.url])) as url:
            with pytest.raises(aiohttp.ClientPayloadError):
                await post(session, url, chat("s", "hi"))
        await nonsense.stop()


async def test_no_replica_alive_is_said(session: aiohttp.ClientSession):
    """503, an error that names each replica and what is wrong with it, and when to come again."""
    dead = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    async with served(Proxy(dead)) as url:
        for path in ("/v1/chat/completions", "/health"):
            async with session.post(url + path, data=json.dumps(chat("s", "hi"))) as answer:
                assert 503 == answer.status
                text = await answer.text()
                assert all(one in text for one in dead) and "Connection refused" in text
                if path != "/health":
                    assert "1" == answer.headers["Retry-After"] and "no replica is alive" in text


async def test_a_replica_that_fails_its_health_checks_is_left_out(
    url: str, proxy: Proxy, stubs: list[Stub], session: aiohttp.ClientSession
):
    """Two looks in a row that fail leave it out, though it would answer; one that succeeds brings it back."""
    stubs[1].healthy = False
    await until(lambda: not proxy.replicas.by_id[stubs[1].url].alive)
    assert stubs[1].port not in await ports(session, url)
    async with session.get(f"{url}/health") as health:
        told = (await health.json())["replicas"][stubs[1].url]
        assert 200 == health.status
    assert not told["alive"] and "/health answered 500" == told["why"]
    stubs[1].healthy = True
    await until(lambda: proxy.replicas.by_id[stubs[1].url].alive)
    assert stubs[1].port in await ports(session, url)


async def test_a_replica_that_breaks_requests_is_left_out_though_it_looks_well(
    stubs: list[Stub], session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
):
    """After two requests that it took and did not answer it gets no more for a while, whatever /health says."""
    monkeypatch.setattr(replicas, "OUT_MIN_S", 30.0)
    nonsense = Nonsense(b"")
    await nonsense.start()
    proxy = Proxy([nonsense.url, stubs[0].url])
    async with served(proxy) as url:
        told = [await post(session, url, chat(f"{number}" * 999, "hi")) for number in range(12)]
        await asyncio.sleep(2.5 * replicas.CHECK_EVERY_S)
        told += [await post(session, url, chat(f"{number}" * 999, "hi")) for number in range(12)]
    await nonsense.stop()
    assert 2 == nonsense.asked == [status for status, _ in told].count(502)


async def test_bad_bodies_are_answered_here(url: str, stubs: list[Stub], session: aiohttp.ClientSession):
    """400 in the form that OpenAI's clients know; no replica is asked."""
    for body, words in ((b"{", "not JSON"), (b'{"messages": []}', "messages is empty")):
        status, told = await post(session, url, body)
        assert 400 == status and words in told["error"]["message"] and "invalid_request_error" == told["error"]["type"]
    assert not any(stub.requests for stub in stubs)
    assert 200 == (await post(session, url, {"prompt": "x"}, "/v1/completions"))[0]


async def test_a_path_cannot_lead_elsewhere(url: str, stubs: list[Stub]):
    """A target without a slash at its beginning would make another host of a replica's address: it is refused."""
    host, port = url.removeprefix("http://").split(":")
    for target in ("@127.0.0.2/", "*", "%2Fnowhere.invalid", ".nowhere.invalid/", "http://nowhere.invalid/v1/models"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"OPTIONS {target} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
        status = int((await reader.readline()).split()[1])
        writer.close()
        assert status == (200 if target.startswith("http") else 400), target
    assert ["/v1/models"] == [path for stub in stubs for _, path, _, _ in stub.requests]


async def test_a_packed_body_is_passed_on(url: str, stubs: list[Stub], session: aiohttp.ClientSession):
    """It is not unpacked here, so it is routed by load."""
    body = json.dumps(chat("s", "hi")).encode()
    async with session.post(
        f"{url}/v1/chat/completions", data=gzip.compress(body), headers={"Content-Encoding": "gzip"}
    ) as answer:
        assert 200 == answer.status
    assert [body] == [arrived for stub in stubs for *_, arrived in stub.requests]


async def test_a_busy_replica_is_passed_over(stubs: list[Stub], session: aiohttp.ClientSession):
    """When more than the allowed number wait at the target, the next by rank gets what follows."""
    for stub in stubs:
        stub.gate.clear()
    proxy = Proxy([stub.url for stub in stubs], RoutingSettings(guard=Guard(slack=3, factor=1, ranks=2)))
    async with served(proxy) as url:
        asked = [asyncio.create_task(post(session, url, chat(LONG, "same " * 200))) for _ in range(9)]
        await until(lambda: 9 == sum(len(stub.requests) for stub in stubs))
        assert [1, 4, 4] == sorted(len(stub.requests) for stub in stubs)
        for stub in stubs:
            stub.gate.set()
        assert {200} == {status for status, _ in await asyncio.gather(*asked)}


async def test_large_bodies_pass_whole(
    url: str, stubs: list[Stub], session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
):
    """Megabytes come in several parts; a body larger than is allowed is refused and not sent."""
    monkeypatch.setattr(intake, "BODY_NBYTES_MAX", 6 << 20)
    text = "x" * (5 << 20)
    assert 200 == (await post(session, url, {"prompt": text}, "/v1/completions"))[0]
    status, told = await post(session, url, {"prompt": text + text}, "/v1/completions")
    assert 413 == status and "larger than 6 MiB" in told["error"]["message"]
    assert {len(text)} == {len(json.loads(body)["prompt"]) for stub in stubs for *_, body in stub.requests}


async def test_addresses_that_are_none_are_refused():
    """Each in a line that names it; the same replica twice as well, with a slash or without."""
    bad_ones = ["10.0.0.1:8000", "ftp://a", "http://", "http://a?b=1", "http://[", "http://a:port", ""]
    for bad in [*bad_ones, "http://me:key@a:1", "http://:key@a:1"]:
        with pytest.raises(BadInput, match=r"--replica .*: it must be an address"):
            Proxy([bad])
    with pytest.raises(BadInput, match="it is there already"):
        Proxy(["http://a:1", "http://a:1/"])
    with pytest.raises(BadInput, match="no replica is named"):
        Proxy([])


async def test_a_replica_may_have_a_path(stubs: list[Stub], session: aiohttp.ClientSession):
    """Requests go below it."""
    async with served(Proxy([stubs[0].url + "/models/a/"])) as url:
        await post(session, url, chat("s", "hi"))
    assert ["/models/a/v1/chat/completions"] == [path for _, path, _, _ in stubs[0].requests]


async def ports(session: aiohttp.ClientSession, url: str) -> list[int]:
    """Where each of 30 prompts goes."""
    out = []
    for number in range(30):
        status, told = await post(session, url, {"prompt": f"{number} " * 600}, "/v1/completions")
        assert 200 == status, told
        out.append(told["port"])
    assert len(Counter(out)) > 1
    return out


async def until_idle(session: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(10):
        while True:
            async with session.get(f"{url}/health") as health:
                if not any(one["waiting"] for one in (await health.json())["replicas"].values()):
                    return
            await asyncio.sleep(0.01)
