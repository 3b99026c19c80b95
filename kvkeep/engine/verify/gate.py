"""Gate: sends scenarios through a cached engine and has every request of them judged.

Must not know how a judge comes to its verdict.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvkeep.engine.engine import Engine, EngineConfig, Request, SamplingParams
from kvkeep.engine.loader import LoadedModel
from kvkeep.engine.verify.compare import Difference
from kvkeep.engine.verify.counts import Counts, counted
from kvkeep.engine.verify.faults import FailingBackend
from kvkeep.engine.verify.scenarios import CONCURRENCY, Ask, Scenario
from kvkeep.report import JsonValue
from kvkeep.tiers.memory import PageMemory
from kvkeep.transfer.backend import Backend

CHUNK_PAGES = 2  # prefill chunks of the cached runs, in pages: small, so that hits begin inside chunks too


class Judge(Protocol):
    """Says of each request of a cached engine whether it computed the bits it had to."""

    def watch(self, engine: Engine) -> None:
        """Turn to an engine that has not run yet."""

    def after_step(self) -> None:
        """The engine has made one step."""

    def judge(self, request: Request) -> Difference | None:
        """The first difference of a finished request; asked once for each."""


@dataclass(frozen=True, slots=True)
class Case:
    """One request that was compared. `complaint` says what it found in the cache where that was not what it had to."""

    scenario: str
    request: int
    prompt_tokens: int
    output_tokens: int
    matched_tokens: int
    host_tokens: int
    preemptions: int
    suspensions: int
    hole_tokens: int
    images: int
    encoded: int
    difference: Difference | None
    complaint: str | None

    @property
    def failed(self) -> bool:
        """Whether a promise was broken."""
        return self.difference is not None or self.complaint is not None

    def to_row(self) -> dict[str, JsonValue]:
        """The case as a row of the report."""
        found = self.difference
        return {
            "scenario": self.scenario,
            "request": self.request,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "matched_tokens": self.matched_tokens,
            "matched_host_tokens": self.host_tokens,
            "preemptions": self.preemptions,
            "suspensions": self.suspensions,
            "hole_tokens": self.hole_tokens,
            "images": self.images,
            "encoded": self.encoded,
            "mismatch": int(found is not None),
            "differs": None if found is None else found.what,
            "layer": None if found is None else found.layer,
            "position": None if found is None else found.position,
            "complaint": self.complaint,
        }


@dataclass(slots=True)
class Findings:
    """What the gate has found so far. `untested` names what a scenario was for and did not come to.

    counts: what happened in all scenarios together.
    """

    cases: list[Case] = field(default_factory=list)
    untested: list[str] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    scenario: str = ""

    @property
    def mismatches(self) -> int:
        """Compared requests that differed in any bit."""
        return sum(case.difference is not None for case in self.cases)

    def cases_of(self) -> Mapping[str, int]:
        """Compared requests by scenario."""
        return Counter(case.scenario for case in self.cases)

    @property
    def complaints(self) -> int:
        """Compared requests that found something else in the cache than they had to."""
        return sum(case.complaint is not None for case in self.cases)


class Gate:
    """Runs scenarios on one model under one judge, each on an engine of its own, and collects what is found."""

    def __init__(self, loaded: LoadedModel, page_size: int, strict: bool, judge: Judge, findings: Findings) -> None:
        self._loaded = loaded
        self._page_size = page_size
        self._strict = strict
        self._judge = judge
        self._findings = findings

    def run(self, scenarios: Iterable[Scenario], cases_max: int) -> None:
        """Run scenarios in turn until `cases_max` requests have been compared; the last wave is completed."""
        for scenario in scenarios:
            if len(self._findings.cases) >= cases_max:
                return
            self._findings.scenario = scenario.name
            self._run(scenario, cases_max)

    def _run(self, scenario: Scenario, cases_max: int) -> None:
        engine, faults = self._engine(scenario)
        self._judge.watch(engine)
        findings, waves, requests = self._findings, scenario.waves(), list[Request]()
        asks = next(waves)
        complete = False
        while not complete:
            asked = self._wave(scenario, engine, asks)
            requests += asked
            if len(findings.cases) >= cases_max:
                break
            try:
                asks = waves.send([request.output_ids for request in asked])
            except StopIteration:
                complete = True
        engine.cache.check_invariants()
        counts = counted(engine, requests, faults)
        findings.counts += counts
        if complete:
            self._check_tested(scenario, counts)
        engine.close()

    def _engine(self, scenario: Scenario) -> tuple[Engine, FailingBackend | None]:
        """A scenario's engine, and what makes its copies fail."""
        below, faults = scenario.below, list[FailingBackend]()

        def wrap(inner: Backend, gpu: PageMemory, host: PageMemory) -> Backend:
            if below.fails is None:
                return inner
            faults.append(FailingBackend(inner, gpu, host, *below.fails))
            return faults[0]

        config = EngineConfig(
            page_size=self._page_size,
            pool_pages=scenario.pool_pages,
            chunk_tokens=CHUNK_PAGES * self._page_size,
            arithmetic="strict" if self._strict else "fast",
            max_batch=CONCURRENCY,
            host_pages=below.host_pages,
            suspend_pages=below.suspend_pages,
            suspend=below.suspend,
            weigh_loads=False,
        )
        engine = Engine(self._loaded, config, wrap_backend=wrap)
        return engine, faults[0] if faults else None

    def _wave(self, scenario: Scenario, engine: Engine, asks: list[Ask]) -> list[Request]:
        requests = [
            engine.submit(
                ask.prompt,
                SamplingParams(max_new_tokens=ask.new, temperature=ask.temperature, seed=ask.seed),
                salt=ask.salt,
                images=ask.images,
            )
            for ask in asks
        ]
        while engine.step():
            self._judge.after_step()
        for ask, request in zip(asks, requests, strict=True):
            self._findings.cases.append(
                Case(
                    scenario=scenario.name,
                    request=request.number,
                    prompt_tokens=request.prompt_len,
                    output_tokens=len(request.output_ids),
                    matched_tokens=request.matched_len,
                    host_tokens=request.host_len,
                    preemptions=request.preemptions,
                    suspensions=request.suspensions,
                    hole_tokens=request.hole_len,
                    images=len(request.images),
                    encoded=request.encoded,
                    difference=self._judge.judge(request),
                    complaint=_complaint(ask, request),
                )
            )
        return requests

    def _check_tested(self, scenario: Scenario, counts: Counts) -> None:
        """A scenario that never got to what it is for must not pass for a test of it."""
        found = dict(counts.items())
        for name, least in scenario.at_least.items():
            if found[name] < least:
                self._findings.untested.append(f"{scenario.name}: {found[name]} {name} where {least} had to be")
        for name in scenario.never:
            if found[name]:
                self._findings.untested.append(f"{scenario.name}: {found[name]} {name} where none had to be")


def _complaint(ask: Ask, request: Request) -> str | None:
    """What a request found in the cache, where that was not what it had to."""
    if ask.matched is not None and ask.matched != request.matched_len:
        return f"{request.matched_len} tokens came from the cache where {ask.matched} had to"
    if ask.from_host is not None and ask.from_host != request.host_len:
        return f"{request.host_len} tokens came from host memory where {ask.from_host} had to"
    if ask.encoded is not None and ask.encoded != request.encoded:
        return f"the vision tower ran {request.encoded} times where {ask.encoded} had to do"
    return None
