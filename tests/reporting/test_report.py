"""kvkeep report: the page says what the results say, and loads nothing."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvkeep import __version__
from kvkeep.errors import BadInput
from kvkeep.report import JsonValue, Metric, Report
from kvkeep.reporting.command import ReportOptions, every_figure, run
from kvkeep.reporting.figure import Figure, LeftOut
from kvkeep.reporting.headline import PROMISES, Verdict, judge
from kvkeep.reporting.inputs import read_inputs
from kvkeep.reporting.serving import interpolated, parse_point
from kvkeep.reporting.svg import Scale, apart, ticks
from kvkeep.telemetry.trace import Recorder

Write = Callable[..., Path]
Row = dict[str, JsonValue]


def request_row(config: str, turn: int, ttft_s: float) -> Row:
    """A request of `bench agent`."""
    return {
        **{"series": "request", "workload": "tau", "load": 0.8, "config": config, "session": 0, "turn": turn},
        **{"due_s": 1.0 * turn, "first_s": 1.0 * turn + ttft_s, "end_s": 1.0 * turn + ttft_s + 0.5, "ttft_s": ttft_s},
        **{"prompt_tokens": 900, "matched_gpu_tokens": 128, "matched_cpu_tokens": 256},
    }


AGENT = Report(
    "bench agent",
    True,
    {
        "ttft_ratio": Metric(5.25, "ratio", samples=24, interval=(4.5, 6.0), better="higher"),
        "goodput_ratio": Metric(1.5, "ratio", interval=(1.2, 1.8), better="higher"),
        "pool_share": Metric(0.25, "of the working set"),
    },
    [
        request_row(c, t, s)
        for t in (0, 1)
        for c, s in (("off", 2.0 + t), ("off", 4.0 + t), ("both", 0.5), ("both", 0.7))
    ],
    record={"arguments": ["--seed", "3"], "noise": {"noisy": True}},
)
SWEEP = Report(
    "bench sweep",
    True,
    {"working_set_pages": Metric(100, "pages")},
    [
        {
            **{"series": "sweep", "pool_pages": pages, "pool_tokens": 128 * pages, "matched_share": share},
            **{"predicted_share": share, "predicted_lru_share": share / 2},
        }
        for pages, share in ((20, 0.1), (40, 0.5), (100, 0.9))
    ],
)
TRANSFER = Report(
    "bench transfer",
    False,
    {"h2d_gbps": Metric(15.0, "GB/s"), "d2h_gbps": Metric(9.0, "GB/s"), "floor_memcpy_gbps": Metric(20.0, "GB/s")},
    [
        {"metric": "h2d_gbps", "limit": "0.5 x floor", "bound": 10.0, "reached": True},
        {"metric": "d2h_gbps", "limit": "0.5 x floor", "bound": 10.0, "reached": False},
    ],
)
PEERS = Report(
    "bench peers",
    True,
    {
        "w1_ratio_vllm": Metric(14.0, "ratio", interval=(13.0, 15.0)),
        "w1_ratio_vllm_default": Metric(7.0, "ratio"),
        "w1_ratio_lmcache": Metric(None, "ratio"),
        "w1_us_kvkeep": Metric(100.0, "us", interval=(98.0, 102.0)),
        "w1_us_kvkeep_lru": Metric(50.0, "us", interval=(49.0, 51.0)),
        "w1_us_vllm": Metric(700.0, "us", interval=(690.0, 720.0)),
        "w1_matched_vllm": Metric(0.9649, "of prompt tokens"),
    },
    [
        {"peer": "lmcache", "version": None, "reason": "no wheel <here>"},
        {"case": "w1", "variant": "kvkeep", "unit": "us", "median": 100.0},
        {"case": "w1", "variant": "kvkeep_lru", "unit": "us", "median": 50.0},
        {"case": "w1", "variant": "vllm", "unit": "us", "median": 700.0},
        {"case": "w1", "variant": "lmcache", "reason": "no wheel <here>"},
    ],
)
OTHERS = {"agent": AGENT, "sweep": SWEEP, "transfer": TRANSFER, "peers": PEERS}


def trace() -> dict[str, Any]:
    """Two requests, one behind a gate, a copy and an eviction."""
    clock = iter(range(0, 10**12, 10**9))
    to = Recorder(clock=lambda: next(clock))
    pid = to.process("engine: pool 4 pages, host 8")
    for of, begin in (("0", 1), ("1", 3)):
        to.begin(pid, "request", of, f"request {of}", begin * 10**9)
        for stage, at, until in (("gate", 0, 1), ("prefill", 1, 3), ("decode", 3, 4)):
            to.begin(pid, "request", of, stage, (begin + at) * 10**9)
            to.end(pid, "request", of, stage, (begin + until) * 10**9)
        to.end(pid, "request", of, f"request {of}", (begin + 4) * 10**9, {"prompt_tokens": 50})
    to.begin(pid, "h2d", "0", "h2d load", 10**9, {"cause": "load", "pages": 3})
    to.end(pid, "h2d", "0", "h2d load", 2 * 10**9, {"copy_us": 250_000.0, "ok": True})
    to.span(pid, 1, "prefill", 2 * 10**9, 4 * 10**9, {"prompt_tokens": 100, "decodes": 0})
    to.instant(pid, 2, "GPU: evicted", {"tier": "GPU", "pages": 5})
    to.counter(pid, "GPU pool [pages]", 2 * 10**9, {"live": 1, "cached": 2, "free": 1})
    to.other |= {
        "version": __version__,
        "command": "kvkeep demo",
        "missed_tokens": {str(pid): {"evicted": 300, "never seen": 100}},
    }
    return to.to_json()


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes results by name, and a trace; the folder."""

    def put(*names: str, traced: bool = False, **more: Mapping[str, Any] | str) -> Path:
        for name in names:
            OTHERS[name].write(tmp_path / f"{name}.json")
        if traced:
            (tmp_path / "trace.json").write_text(json.dumps(trace()))
        for name, found in more.items():
            (tmp_path / f"{name}.json").write_text(found if isinstance(found, str) else json.dumps(found))
        return tmp_path

    return put


def figures(folder: Path, point: str | None = None) -> dict[str, Figure]:
    """Those that are drawn, by their address."""
    return {one.slug: one for one in every_figure(read_inputs([folder]), point) if isinstance(one, Figure)}


def tips(figure: Figure, what: str = "") -> list[str]:
    """What the marks of the wide picture say."""
    wide = figure.picture.split("</svg>")[0]
    return [tip for tip in re.findall(r'data-tip="([^"]*)"', wide) if what in tip]


def made(folder: Path, point: str | None = None) -> str:
    """The page."""
    run(ReportOptions([folder], folder / "out.html", point))
    return (folder / "out.html").read_text()


# ---------------------------------------------------------------------- what is read


def test_file_of_another_version_or_cut_short_is_named_and_skipped(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are used, and the page says which were not."""
    cut = json.dumps(AGENT.to_json())[:200]
    page = made(write("transfer", old={**AGENT.to_json(), "version": "0.0.1"}, cut=cut, other={"traceEvents": []}))
    said = capsys.readouterr().out
    for line in ("old.json: of version 0.0.1", "cut.json: cut short", "other.json: a trace, but none of kvkeep"):
        assert line in said
        assert line in page
    assert "host to GPU" in page


def test_trace_that_would_not_open_is_skipped_with_its_fault(write: Write) -> None:
    """As a result that is cut short."""
    found = trace()
    found["traceEvents"].reverse()
    (reason,) = read_inputs([write(bad=found)]).skipped
    assert "bad.json: no whole trace (events are not sorted by ts" in reason


def test_nothing_usable_is_bad_input_and_nothing_is_written(write: Write) -> None:
    """One line that says what would be right."""
    folder = write(cut="{")
    with pytest.raises(BadInput, match="none of the files can be used; name what"):
        run(ReportOptions([folder], folder / "out.html"))
    assert not (folder / "out.html").exists()
    with pytest.raises(BadInput, match="no such file or folder"):
        run(ReportOptions([folder / "absent.json"], folder / "out.html"))


@pytest.mark.parametrize("said", ["", "many", "-3", "0", "24GB", "nan"])
def test_point_that_is_no_size_is_bad_input(said: str) -> None:
    """With the forms that are."""
    with pytest.raises(BadInput, match="24GiB"):
        parse_point(said)


def test_result_of_bench_all_is_one_of_each_case(write: Write) -> None:
    """Metrics by their prefix, rows by their case."""
    rows: list[Row] = [
        {"case": "transfer", "seconds": 3.0, "exit_code": 0},
        *({"case": "transfer", **row} for row in TRANSFER.rows),
    ]
    whole = Report("bench all", True, {f"transfer.{n}": m for n, m in TRANSFER.metrics.items()}, rows)
    folder = write(all=whole.to_json())
    assert ["host to GPU: 15 GB/s, 75 % of the ceiling"] == tips(figures(folder)["transfer-0"], "host to GPU")


# ---------------------------------------------------------------------- what is said


@pytest.mark.parametrize(
    ("value", "interval", "verdict"),
    [(5.0, (4.2, 6.0), "reached"), (5.0, (3.0, 6.0), "noise"), (3.0, (2.0, 3.9), "missed"), (4.0, None, "reached")],
)
def test_limit_inside_the_interval_is_neither_reached_nor_missed(value: float, interval: Any, verdict: Verdict) -> None:
    """Of a lower bound of 4."""
    assert verdict == judge(Metric(value, "ratio", interval=interval), PROMISES[0], smoke=False)
    assert "smoke" == judge(Metric(value, "ratio", interval=interval), PROMISES[0], smoke=True)


def test_cost_above_its_limit_is_missed() -> None:
    """An upper bound of 1 %."""
    overhead = next(one for one in PROMISES if one.metric == "overhead_share")
    assert "missed" == judge(Metric(0.03, "share", interval=(0.02, 0.04)), overhead, smoke=False)
    assert "reached" == judge(Metric(0.002, "share", interval=(-0.01, 0.004)), overhead, smoke=False)


def test_tiles_have_the_values_limits_and_verdicts_of_the_results(write: Write) -> None:
    """And a peer that is not there has its reason below."""
    page = made(write("agent", "peers"))
    tiles = re.findall(r'<li class="tile (\w+)"><p class="big">([\d.]+)<', page)
    assert [("reached", "5.25"), ("missed", "1.5"), ("reached", "14")] == tiles
    assert "w1_ratio_lmcache: no wheel &lt;here&gt;" in page
    assert "overhead_share: no result of <code>kvkeep bench overhead</code> has it" in page


def test_every_request_is_a_point_and_the_table_has_the_medians(write: Write) -> None:
    """Of each configuration, by turn, counted from 1."""
    figure = figures(write("agent"))["ttft-agent-0"]
    assert 8 == len(tips(figure))
    assert ["cache off, turn 2: 3 s", "cache off, turn 2: 5 s"] == tips(figure, "cache off, turn 2")
    assert figure.table is not None
    assert [[1, 3.0, pytest.approx(0.6), 2], [2, 4.0, pytest.approx(0.6), 2]] == figure.table.rows


def test_point_of_the_user_lies_on_the_measured_curve(write: Write) -> None:
    """Between two sizes it is between their shares; without it the share of `bench agent` is taken."""
    assert ["your pool, 30 pages: 30.0 %"] == tips(figures(write("sweep"), "30")["hits-0"], "your pool")
    assert ["your pool, 30 pages: 30.0 %"] == tips(figures(write("sweep"), "3840 tokens")["hits-0"], "your pool")
    assert ["a pool as of bench agent, 25 pages: 20.0 %"] == tips(figures(write("agent", "sweep"))["hits-0"], "a pool")


def test_point_that_cannot_be_placed_is_said(write: Write) -> None:
    """GiB on a curve of pages, of which nobody knows how large they are."""
    figure = figures(write("sweep"), "24GiB")["hits-0"]
    assert [] == tips(figure, "your pool")
    assert "The point 24GiB is not shown" in figure.note


def test_bars_of_transfers_are_as_long_as_their_rates(write: Write) -> None:
    """On one scale, with the ceiling at its place."""
    figure = figures(write("transfer"))["transfer-0"]
    wide = figure.picture.split("</svg>")[0]
    first, second = (float(found) for found in re.findall(r'class="fill c-gpu"[^>]*? width="([\d.]+)"', wide))
    ceiling = float(re.findall(r'class="floor" x1="([\d.]+)"', wide)[0])
    assert pytest.approx(15 / 9, rel=0.01) == first / second
    assert pytest.approx(20 / 15, rel=0.01) == ceiling / first
    assert "below their limit: GPU to host" in figure.says


def test_timeline_has_every_stage_copy_and_eviction_of_the_trace(write: Write) -> None:
    """In seconds from the first request on."""
    figure = figures(write(traced=True))["timeline-0"]
    assert figure.says.startswith("2 requests in 6 s; 1 copies moved bytes for 250 ms, requests waited 2 s")
    assert 2 == len(tips(figure, "prefill 2 s; 50 tokens"))
    assert 2 == len(tips(figure, "load, 3 pages"))  # on its way, and the bytes
    assert figure.table is not None
    rows = {str(row[0]): row[1] for row in figure.table.rows}
    assert (2.0, 4.0, 2.0) == (rows["gate: waits for copies"], rows["prefill"], rows["decode"])


def test_requests_that_overlap_have_lanes_of_their_own(write: Write) -> None:
    """The second begins before the first ends."""
    wide = figures(write(traced=True))["timeline-0"].picture.split("</svg>")[0]
    assert 2 == len(set(re.findall(r'class="s-prefill" x="[\d.]+" y="([\d.]+)"', wide)))


def test_cost_of_misses_is_their_tokens_at_the_measured_pace(write: Write) -> None:
    """100 tokens in 2 s: 300 that were evicted are 6 s."""
    figure = figures(write(traced=True))["misses-0"]
    assert ["evicted: 300 tokens, 6 s", "never seen: 100 tokens, 2 s"] == tips(figure)


def test_peers_stand_beside_us_with_their_ratio_or_their_reason(write: Write) -> None:
    """What could not be installed has an empty column."""
    figure = figures(write("peers"))["peers"]
    assert ">14 \u00d7<" in figure.picture and ">96.5%<" in figure.picture and ">690 to 720<" in figure.picture
    assert "no wheel &lt;here&gt;" in figure.picture
    assert "14 \u00d7 faster than vLLM's (7 by default)" in figure.says


def test_figure_without_a_result_is_left_out_with_what_to_give(write: Write) -> None:
    """One line each."""
    found = every_figure(read_inputs([write("transfer")]))
    absent = [one for one in found if isinstance(one, LeftOut)]
    assert 5 == len(absent)
    assert all("was given" in one.reason for one in absent)


# ---------------------------------------------------------------------- the page


def test_page_loads_nothing_and_every_figure_says_its_command(write: Write) -> None:
    """No address, no import, no file; commit and machine beside the command."""
    page = made(write("agent", "sweep", "transfer", "peers", traced=True))
    assert [] == re.findall(r"https?:|//[a-z]|@import|url\(|<(?:img|iframe|object|embed)|\ssrc=", page)
    assert "default-src 'none'" in page
    for part in re.findall(r"<section id=\"(?!metrics|absent).*?</section>", page, re.DOTALL):
        assert re.search(r'class="origin"><code>kvkeep [^<]+</code>; commit \w+; .', part)
    assert "kvkeep bench agent --seed 3" in page
    assert "the machine was noisy" in page
    assert len(page) < 400_000


def test_every_picture_has_a_title_a_description_and_its_numbers_in_a_table(write: Write) -> None:
    """For whoever does not see it."""
    for figure in figures(write("agent", "sweep", "transfer", traced=True)).values():
        pictures = figure.picture.split("</svg>")[:-1]
        assert 2 == len(pictures)
        for picture in pictures:
            assert re.search(r'role="img".*?<title>[^<]+</title><desc>[^<]+</desc>', picture)
        assert figure.table is not None
        assert figure.table.rows


def test_words_of_a_results_file_are_never_markup(write: Write) -> None:
    """A file of somebody else may say anything."""
    bad = "<script>alert(1)</script>\"'>"
    rows: list[Row] = [{"metric": "h2d_gbps", "what": bad, "limit": bad, "reached": True}]
    metrics = {**TRANSFER.metrics, f"h2d {bad}_gbps": Metric(3.0, "GB/s"), bad: Metric(1.0, bad)}
    found = {**Report("bench transfer", True, metrics, rows).to_json(), "commit": bad, "machine": {"cpu": bad}}
    page = made(write(bad={**found, "record": {"arguments": [bad]}}))
    assert 1 == page.count("<script>")
    assert "alert(1)" in page


def test_ticks_are_round_and_hold_the_highest_value() -> None:
    """From 0 on."""
    assert [0, 2, 4, 6, 8] == ticks(7.2, 4)
    assert [0, 0.25, 0.5, 0.75] == ticks(0.7, 3)


def test_labels_keep_their_distance_and_stay_inside() -> None:
    """In the order of what they name."""
    places = apart([100, 98, 101], 16, 0, 110)
    assert max(places) <= 110
    assert [1, 0, 2] == sorted(range(3), key=lambda i: places[i])
    assert all(abs(a - b) >= 16 for n, a in enumerate(places) for b in places[:n])


def test_scale_by_factors_has_equal_steps_for_equal_factors() -> None:
    """As sizes of pools are looked at."""
    scale = Scale(1, 16, 0, 100, log=True)
    assert [0, 25, 50, 75, 100] == [pytest.approx(scale(size)) for size in (1, 2, 4, 8, 16)]


def test_share_outside_the_known_sizes_is_that_of_the_nearest() -> None:
    """Nothing is made up."""
    assert (0.1, 0.9) == (interpolated([(2, 0.1), (4, 0.9)], 1), interpolated([(2, 0.1), (4, 0.9)], 9))
