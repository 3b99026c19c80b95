"""The bit gate with images: vision-language models over photographs, cached against computing from scratch.

Must not know how tokens, or pixels, become forwards.
"""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from kvkeep.errors import BadInput
from kvkeep.report import INTERRUPTED, Metric, Report

if TYPE_CHECKING:
    from rich.console import Console

    from kvkeep.engine.loader import LoadedModel
    from kvkeep.engine.verify.gate import Findings
    from kvkeep.engine.verify.images import Album
    from kvkeep.engine.verify.scenarios import Scenario, Sizes

# Compared requests of each model where nobody says how many: the fixed scenarios, about 120, and some drawn at random.
CASES_DEFAULT = 250
WEIGHTS = "architectures of transformers, small, with weights from a seed: none that learnt can be had offline"


@dataclass(frozen=True)
class MultimodalOptions:
    """What the gate runs.   cases: requests of each model to compare, the fixed scenarios first; None: the default."""

    cases: int | None = None
    page_size: int = 128
    seed: int = 0


@dataclass(slots=True)
class Found:
    """Of one model.   noticed: for each planted fault, how many requests differed in a bit."""

    findings: "Findings"
    noticed: dict[str, int] = field(default_factory=dict)


def run(options: MultimodalOptions) -> Report:
    """Run the gate, say what was found, and return its report.   Raises `BadInput` for options that cannot be run."""
    from rich.console import Console

    from kvkeep.engine.verify.gate import Findings
    from kvkeep.engine.verify.images import PAGE_MIN
    from kvkeep.engine.verify.scenarios import Sizes
    from kvkeep.engine.vision.models import MODELS, TEXT

    sizes = Sizes.fitting(options.page_size, TEXT["max_position_embeddings"])
    if sizes is None or sizes.page < PAGE_MIN:
        page_max = TEXT["max_position_embeddings"] // 4
        raise BadInput(f"--page-size {options.page_size}: with images it must be {PAGE_MIN} to {page_max}")
    console = Console(highlight=False)
    console.print(f"{', '.join(MODELS)}: {WEIGHTS}", soft_wrap=True)
    found: dict[str, Found] = {}
    started_s = time.perf_counter()
    interrupted = False
    try:
        for name in MODELS:
            found[name] = Found(Findings())
            _run(name, options, sizes, console, found[name])
    except KeyboardInterrupt:
        interrupted = True
    report = _report(found, interrupted, time.perf_counter() - started_s)
    for line in _summary(found, interrupted):
        console.print(line, markup=False, soft_wrap=True)
    return report


def _run(name: str, options: MultimodalOptions, sizes: "Sizes", console: "Console", found: Found) -> None:
    from kvkeep.engine.verify import images
    from kvkeep.engine.verify.gate import Findings, Gate
    from kvkeep.engine.verify.image_faults import FAULTS
    from kvkeep.engine.verify.strict import FromScratch
    from kvkeep.engine.vision.models import load_vision_model

    loaded = load_vision_model(name)
    rng = random.Random(options.seed)
    album = _album(loaded)

    def draw(count: int) -> list[int]:
        return [rng.randrange(album.vision.placeholder) for _ in range(count)]

    judge = FromScratch(loaded, sizes.page, sizes.pages + 1)
    fixed = [*images.image_scenarios(sizes, album, draw), *images.tier_scenarios(sizes, album, draw)]
    planned = chain(fixed, images.random_image_scenarios(sizes, album, draw, rng))
    gate = Gate(loaded, sizes.page, True, judge, found.findings)
    cases_max = options.cases if options.cases is not None else CASES_DEFAULT
    gate.run(_announced(name, planned, console, found.findings), cases_max)
    for fault in FAULTS:
        scenario = next(scenario for scenario in fixed if scenario.name == fault.scenario)
        spoilt = Findings()
        Gate(fault.model(loaded), sizes.page, True, judge, spoilt).run([fault.planted(scenario, album)], 1000)
        found.noticed[fault.name] = spoilt.mismatches
        console.print(
            f"{name}, planted: {fault.name}: {found.noticed[fault.name]} of {len(spoilt.cases)} requests differ",
            markup=False,
            soft_wrap=True,
        )


def _album(loaded: "LoadedModel") -> "Album":
    """Photographs as the model's image processor makes them, and as another one does."""
    from transformers import SiglipImageProcessorPil

    from kvkeep.engine.verify.images import Album
    from kvkeep.engine.vision.pictures import Preprocessing, photographs

    files = photographs().values()
    assert loaded.vision is not None
    _, height, width = loaded.vision.pixels_shape
    size = {"height": height, "width": width}
    ways = (
        Preprocessing(SiglipImageProcessorPil(size=size)),
        Preprocessing(SiglipImageProcessorPil(size=size, image_mean=[0.48, 0.46, 0.41], image_std=[0.27, 0.26, 0.28])),
    )
    photos, again = (tuple(way.image(0, path) for path in files) for way in ways)
    return Album(loaded.vision, photos, again)


def _announced(
    name: str, planned: Iterator["Scenario"], console: "Console", findings: "Findings"
) -> Iterator["Scenario"]:
    """The scenarios as they are asked for; the one before has been run by then, and its result is said."""
    for scenario in planned:
        compared, failed, counts = len(findings.cases), _failed(findings), findings.counts
        yield scenario
        said = f"{name}, {scenario.name}: {len(findings.cases) - compared} compared, "
        said += f"{_failed(findings) - failed} differ; {findings.counts - counts}"
        console.print(said, markup=False, soft_wrap=True)


def _failed(findings: "Findings") -> int:
    return sum(case.failed for case in findings.cases)


def _report(found: dict[str, Found], interrupted: bool, wall_s: float) -> Report:
    from kvkeep.engine.verify.counts import Counts

    every = [one.findings for one in found.values()]
    cases = [case for findings in every for case in findings.cases]
    noticed = [count > 0 for one in found.values() for count in one.noticed.values()]
    untested = sum(len(findings.untested) for findings in every)
    held = bool(cases) and all(noticed) and not interrupted and not untested and not any(map(_failed, every))
    metrics = {
        "cases": Metric(len(cases), "count"),
        "mismatches": Metric(sum(findings.mismatches for findings in every), "count"),
        "wrong_matches": Metric(sum(findings.complaints for findings in every), "count"),
        "strict": Metric(int(held), "bool"),
        "untested": Metric(untested, "count"),
        "faults_planted": Metric(len(noticed), "count"),
        "faults_noticed": Metric(sum(noticed), "count"),
        "matched_share": Metric(
            sum(case.matched_tokens for case in cases) / sum(case.prompt_tokens for case in cases) if cases else None,
            "share",
        ),
        "wall_s": Metric(wall_s, "s"),
    }
    total = sum((findings.counts for findings in every), Counts())
    metrics |= {name: Metric(value, "count") for name, value in total.items()}
    metrics |= {f"cases_{name}": Metric(len(one.findings.cases), "count") for name, one in found.items()}
    if interrupted:
        metrics[INTERRUPTED] = Metric(1, "bool")
    rows = [{"model": name} | case.to_row() for name, one in found.items() for case in one.findings.cases]
    return Report("verify", held, metrics, rows)


def _summary(found: dict[str, Found], interrupted: bool) -> list[str]:
    lines = ["interrupted: this is what was compared so far"] if interrupted else []
    for name, one in found.items():
        lines += [
            f"{name}, {case.scenario}, request {case.request}: {case.difference or case.complaint}"
            for case in one.findings.cases
            if case.failed
        ][:10]
        lines += [f"{name}, not tested: {what}" for what in one.findings.untested]
        lines += [f"{name}, planted and not noticed: {fault}" for fault, count in one.noticed.items() if not count]
        lines.append(
            f"{name}: {len(one.findings.cases)} requests with images compared with computing from scratch, "
            f"{one.findings.mismatches} differ, {one.findings.complaints} found what they should not have; "
            f"{sum(map(bool, one.noticed.values()))} of {len(one.noticed)} planted faults noticed"
        )
    return lines
