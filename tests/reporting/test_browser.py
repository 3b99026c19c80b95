"""The page in a real browser: it fits, says nothing on the console, and asks for nothing."""

from pathlib import Path

import pytest

from kvkeep.reporting.command import ReportOptions, run
from tests.reporting.browser import browser, show
from tests.reporting.test_report import OTHERS, trace

SHOWN = "[...document.querySelectorAll('svg')].filter(one => one.getClientRects().length).length"
OUTSIDE = (
    "[...document.querySelectorAll('svg text')].filter(one => one.getClientRects().length && "
    "(one.getBoundingClientRect().right > innerWidth || one.getBoundingClientRect().left < 0))"
    ".map(one => one.textContent).join()"
)
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
TURNED = "document.getElementById('theme').click(), " + BACKGROUND
POINTED = (
    "(() => {const mark = [...document.querySelectorAll('[data-tip]')].find(one => one.getClientRects().length);"
    "mark.dispatchEvent(new PointerEvent('pointermove', {bubbles: true, clientX: 50, clientY: 200}));"
    "return document.getElementById('tip').textContent === mark.dataset.tip})()"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import json

    folder = tmp_path_factory.mktemp("report")
    for name, result in OTHERS.items():
        result.write(folder / f"{name}.json")
    (folder / "trace.json").write_text(json.dumps(trace()))
    run(ReportOptions([folder], folder / "report.html", "30"))
    return folder / "report.html"


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_fits_is_silent_and_loads_nothing(page: Path, width: int, scheme: str) -> None:
    """At the width of a phone and of a desk, light and dark; the button turns one into the other; marks speak."""
    pytest.importorskip("aiohttp")
    if browser() is None:
        pytest.skip("no chromium is installed: apt-get install chromium")
    asked = {"shown": SHOWN, "outside": OUTSIDE, "pointed": POINTED, "before": BACKGROUND, "turned": TURNED}
    seen = show(page, width, scheme, asked)
    assert [] == seen.complaints
    assert [page.resolve().as_uri()] == seen.requests
    assert 0 == seen.overflow
    assert 5 == seen.answers["shown"]
    assert "" == seen.answers["outside"]
    assert seen.answers["pointed"] is True
    assert {"rgb(251, 251, 249)", "rgb(20, 23, 26)"} == {seen.answers["before"], seen.answers["turned"]}
    assert "rgb(251, 251, 249)" == seen.answers["before" if scheme == "light" else "turned"]
    assert seen.picture.startswith(b"\x89PNG")
