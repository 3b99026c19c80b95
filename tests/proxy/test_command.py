"""`kvkeep route` as a user runs it: a process that serves, and ends in order when it is stopped."""

import asyncio
import json
import resource
import signal
import socket
import sys
from pathlib import Path

import aiohttp
import pytest

from kvkeep import cli
from kvkeep.proxy.sockets import address_of
from tests.proxy.rigs import Stub, chat, post


@pytest.mark.asyncio
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
async def test_it_serves_until_it_is_stopped(
    how: signal.Signals, stubs: list[Stub], session: aiohttp.ClientSession, repo_root: Path, tmp_path: Path
):
    """It says where it listens, routes, finishes what runs when it is stopped, and reports what went where."""
    for stub in stubs:
        stub.gate.clear()
    words = [word for stub in stubs for word in ("--replica", stub.url)]
    report = tmp_path / "report.json"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvkeep.cli", "route", *words, "--port", "0", "--json", str(report)),
        cwd=repo_root,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        said = (await process.stdout.readline()).decode()
        assert said.endswith(" routes to 3 replicas\n"), said
        running = asyncio.create_task(post(session, said.split()[0], chat("s", "hi")))
        while not any(stub.requests for stub in stubs):
            await asyncio.sleep(0.02)
        process.send_signal(how)
        await asyncio.sleep(0.3)
        for stub in stubs:
            stub.gate.set()
        assert 200 == (await running)[0]
        rest = (await process.stdout.read()).decode()
        assert 0 == await asyncio.wait_for(process.wait(), 20)
    finally:
        if process.returncode is None:
            process.kill()
    assert 1 == rest.count(": 1 requests\n") and 2 == rest.count(": 0 requests\n"), rest
    written = json.loads(report.read_text())
    assert {stub.url for stub in stubs} == {row["replica"] for row in written["rows"]}
    assert 1 == written["metrics"]["requests"]["value"]


@pytest.mark.asyncio
async def test_it_takes_as_many_connections_as_it_may(stubs: list[Stub], repo_root: Path):
    """Each request that is passed on takes two: a low limit that can be raised without asking anybody is raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = min(soft, hard, 256)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvkeep.cli", "route", "--replica", stubs[0].url, "--port", "0"),
        cwd=repo_root,
        stdout=asyncio.subprocess.PIPE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard)),
    )
    try:
        assert process.stdout is not None and await process.stdout.readline()
        assert (hard, hard) == resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), 20)


def test_an_address_is_told_as_a_client_writes_it():
    """One of IPv6 stands in brackets."""
    assert ["http://127.0.0.1:80", "http://[::1]:80"] == [address_of(host, 80) for host in ("127.0.0.1", "::1")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", ["--replica"]),
        ("--replica 10.0.0.1:8000", ["--replica 10.0.0.1:8000", "http://10.0.0.1:8000"]),
        ("--replica http://a:1 --replica http://a:1/", ["http://a:1", "once"]),
        ("--replica http://a:1 --port many", ["--port", "'many'"]),
        ("--replica http://a:1 --port 99999", ["--port 99999", "name another"]),
        ("--replica http://a:1 --host nowhere.invalid", ["--host nowhere.invalid", "name another"]),
        ("--replica http://a:1 --page-size 0", ["--page-size", "'0'"]),
        ("--replica http://a:1 --depth 0", ["--depth", "'0'"]),
        ("--replica http://a:1 --slack -1", ["--slack", "'-1'"]),
        ("--replica http://a:1 now", ["now"]),
    ],
)
def test_what_cannot_be_served_is_one_line_and_exit_code_2(
    arguments: str, words: list[str], capsys: pytest.CaptureFixture[str]
):
    """Each bad option ends at once, in one line that names it and the way out."""
    assert 2 == cli.main(["route", *arguments.split()])
    shown = capsys.readouterr().err
    assert shown.startswith("kvkeep: ") and 1 == shown.count("\n"), shown
    assert all(word in shown for word in words), shown


def test_a_port_in_use_is_refused(capsys: pytest.CaptureFixture[str]):
    """The line names the port and says that it is taken."""

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert 2 == cli.main(["route", "--replica", "http://a:1", "--port", port])
    shown = capsys.readouterr().err
    assert f"--port {port}" in shown and "in use" in shown


@pytest.mark.parametrize("package", ["aiohttp", "uvicorn"])
def test_a_missing_package_names_the_extra(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Without the packages of the proxy the command says which extra to install."""
    for name in [name for name in sys.modules if name.startswith("kvkeep.proxy")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # importing it fails
    assert 2 == cli.main(["route", "--replica", "http://a:1"])
    shown = capsys.readouterr().err
    assert f"needs {package}" in shown and "kvkeep[route]" in shown
