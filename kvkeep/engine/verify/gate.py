"""Gate: sends scenarios through a cached engine and has every request of them judged.

Must not know how a judge comes to its verdict.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from kvkeep.engine.engine import Engine, EngineConfig, Request, SamplingParams
from kvkeep.engine.loader import LoadedModel
from kvkeep.engine.verify.compare import Difference
from kvkeep.engine.verify.scenarios import CONCURRENCY, Ask, Ids, Scenario
from kvkeep.report import JsonValue

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
    preemptions: int
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
            "preemptions": self.preemptions,
            "mismatch": int(found is not None),
            "differs": None if found is None else found.what,
            "layer": None if found is None else found.layer,
            "position": None if found is None else found.position,
            "complaint": self.complaint,
        }


@dataclass(slots=True)
class Findings:
    """What the gate has found so far. `untested` names what a scenario was for and did not come to."""

    cases: list[Case] = field(default_factory=list)
    untested: list[str] = field(default_factory=list)
    pages_evicted: int = 0
    scenario: str = ""

    @property
    def mismatches(self) -> int:
        """Compared requests that differed in any bit."""
        return sum(case.difference is not None for case in self.cases)

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
        engine = Engine(
            self._loaded,
            EngineConfig(
                page_size=self._page_size,
                pool_pages=scenario.pool_pages,
                chunk_tokens=CHUNK_PAGES * self._page_size,
                arithmetic="strict" if self._strict else "fast",
                max_batch=CONCURRENCY,
            ),
        )
        self._judge.watch(engine)
        findings, waves, preemptions = self._findings, scenario.waves(), 0
        asks = next(waves)
        while True:
            outputs = self._wave(scenario, engine, asks)
            preemptions += sum(case.preemptions for case in findings.cases[-len(asks) :])
            if len(findings.cases) >= cases_max:
                break
            try:
                asks = waves.send(outputs)
            except StopIteration:
                self._check_tested(scenario, engine, preemptions)
                break
        findings.pages_evicted += engine.cache.stats().pages_evicted
        engine.cache.check_invariants()

    def _wave(self, scenario: Scenario, engine: Engine, asks: list[Ask]) -> list[Ids]:
        requests = [
            engine.submit(
                ask.prompt,
                SamplingParams(max_new_tokens=ask.new, temperature=ask.temperature, seed=ask.seed),
                salt=ask.salt,
            )
            for ask in asks
        ]
        while engine.step():
            self._judge.after_step()
        for ask, request in zip(asks, requests, strict=True):
            complaint = None
            if ask.matched is not None and ask.matched != request.matched_len:
                complaint = f"{request.matched_len} tokens came from the cache where {ask.matched} had to"
            self._findings.cases.append(
                Case(
                    scenario=scenario.name,
                    request=request.number,
                    prompt_tokens=request.prompt_len,
                    output_tokens=len(request.output_ids),
                    matched_tokens=request.matched_len,
                    preemptions=request.preemptions,
                    difference=self._judge.judge(request),
                    complaint=complaint,
                )
            )
        return [request.output_ids for request in requests]

    def _check_tested(self, scenario: Scenario, engine: Engine, preemptions: int) -> None:
        """A scenario that never got to what it is for must not pass for a test of it."""
        evicted = engine.cache.stats().pages_evicted
        if evicted < scenario.evicted_min:
            self._findings.untested.append(
                f"{scenario.name}: {evicted} cached pages were dropped where {scenario.evicted_min} had to be"
            )
        if preemptions < scenario.preempted_min:
            self._findings.untested.append(
                f"{scenario.name}: {preemptions} requests were preempted where {scenario.preempted_min} had to be"
            )
