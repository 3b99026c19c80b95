"""A real browser for tests: Debian's chromium, headless, driven over its DevTools protocol.

Must not know what pages it shows.
"""

import asyncio
import base64
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
START_S, ANSWER_S = 30.0, 20.0
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@dataclass(slots=True)
class Seen:
    """What came of showing a page.

    requests: addresses that were asked for, the page's own among them.   complaints: of console and script.
    overflow: pixels that the page is wider than its window.   answers: of the expressions that were asked.
    """

    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    overflow: int = 0
    picture: bytes = b""
    answers: dict[str, Any] = field(default_factory=dict)


def browser() -> str | None:
    """The path of a browser; None where there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def show(page: Path, width: int, scheme: str, ask: Mapping[str, str] | None = None) -> Seen:
    """Opens a page in a window of `width` pixels.   scheme: "light" or "dark".   ask: expressions, by name."""
    program = browser()
    assert program is not None
    with tempfile.TemporaryDirectory(prefix="kvkeep-browser-") as profile:
        words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        words += ["--remote-debugging-port=0", "--disable-background-networking", f"--user-data-dir={profile}"]
        process = subprocess.Popen(
            [program, *words, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            return asyncio.run(_show(Path(profile) / "DevToolsActivePort", page, width, scheme, ask or {}))
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _show(port_file: Path, page: Path, width: int, scheme: str, ask: Mapping[str, str]) -> Seen:
    import aiohttp

    until = asyncio.get_running_loop().time() + START_S
    while not port_file.exists() or not port_file.read_text():
        assert asyncio.get_running_loop().time() < until, f"the browser has not started in {START_S:g} s"
        await asyncio.sleep(0.05)
    port = port_file.read_text().split()[0]
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{port}/json") as answer:
            targets = await answer.json()
        address = next(one["webSocketDebuggerUrl"] for one in targets if one["type"] == "page")
        async with session.ws_connect(address, max_msg_size=1 << 28) as socket:
            return await _drive(_Tab(socket), page, width, scheme, ask)


class _Tab:
    """One tab, asked by messages."""

    def __init__(self, socket: Any) -> None:
        self.seen = Seen()
        self.loaded = False
        self._socket = socket
        self._number = 0

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            message = await self.hear()
            if message.get("id") == self._number:
                assert "error" not in message, message
                return dict(message["result"])

    async def hear(self) -> dict[str, Any]:
        message: dict[str, Any] = await asyncio.wait_for(self._socket.receive_json(), ANSWER_S)
        method, params = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.seen.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.seen.complaints.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.seen.complaints.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.seen.complaints.append(params["entry"]["text"])
        elif method == "Page.loadEventFired":
            self.loaded = True
        return message

    async def value(self, expression: str) -> Any:
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return found["result"].get("value")


async def _drive(tab: _Tab, page: Path, width: int, scheme: str, ask: Mapping[str, str]) -> Seen:
    for domain in ("Page", "Network", "Runtime", "Log"):
        await tab.call(f"{domain}.enable")
    await tab.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 700
    )
    await tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    await tab.call("Page.navigate", url=page.resolve().as_uri())
    while not tab.loaded:
        await tab.hear()
    tab.seen.answers = {name: await tab.value(expression) for name, expression in ask.items()}
    tab.seen.overflow = int(await tab.value(OVERFLOW))
    shot = await tab.call("Page.captureScreenshot", captureBeyondViewport=True)
    tab.seen.picture = base64.b64decode(shot["data"])
    return tab.seen
