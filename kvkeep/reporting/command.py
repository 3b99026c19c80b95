"""kvkeep report: reads results and traces, writes the page.

Must not know how a figure is drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvkeep import report as reports
from kvkeep.errors import BadInput
from kvkeep.report import Metric, Report
from kvkeep.reporting.figure import Figure, LeftOut
from kvkeep.reporting.inputs import Inputs, read_inputs
from kvkeep.reporting.machine import peers, transfers
from kvkeep.reporting.page import page
from kvkeep.reporting.serving import hit_curves, misses, parse_point, ttft_by_turn
from kvkeep.reporting.timeline import timelines


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """results: files, or folders of them.   output: the page.   point: the user's pool, on the hit curve."""

    results: Sequence[Path]
    output: Path
    point: str | None = None


def run(options: ReportOptions) -> Report:
    """Write the page.  Raises `BadInput` for files that are not there, or where none of them can be used."""
    if options.point is not None:
        parse_point(options.point)
    reports.check_writable(options.output, "-o")
    inputs = read_inputs(options.results)
    for line in inputs.skipped:
        print(line)
    if not inputs.results and not inputs.traces:
        raise BadInput(
            "report: none of the files can be used; name what `--json FILE` or `--trace FILE` of this version wrote"
        )
    figures = every_figure(inputs, options.point)
    try:
        reports.write_whole(options.output, page(inputs, figures))
    except OSError as error:
        raise BadInput(f"-o {options.output}: cannot write ({error.strerror}); nothing was written") from error
    for one in figures:
        print(f"{one.title}: {one.says}" if isinstance(one, Figure) else f"{one.title}: left out, {one.reason}")
    shown = sum(isinstance(one, Figure) for one in figures)
    size = options.output.stat().st_size
    print(f"{options.output}: {shown} figures, {size / 1024:.0f} KiB")
    return Report(
        "report", True, {"figures": Metric(shown, "figures"), "skipped": Metric(len(inputs.skipped), "files")}
    )


def every_figure(inputs: Inputs, point: str | None = None) -> list[Figure | LeftOut]:
    """All figures, in the order of the page."""
    return [
        *ttft_by_turn(inputs),
        *hit_curves(inputs, point),
        *timelines(inputs),
        *misses(inputs),
        *transfers(inputs),
        *peers(inputs),
    ]
