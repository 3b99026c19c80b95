"""The bit gate: it passes on the real thing and fails on every kind of wrong page that is planted."""

import json
import random
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from kvkeep import cli
from tests.cli.conftest import TINY, Run

torch = pytest.importorskip("torch")

from kvkeep.cache import TieredCache  # noqa: E402 (needs torch)
from kvkeep.engine.asking import random_ids  # noqa: E402
from kvkeep.engine.loader import load_model  # noqa: E402
from kvkeep.engine.verify.compare import kv_difference, output_difference, same_bits  # noqa: E402
from kvkeep.engine.verify.counts import Counts  # noqa: E402
from kvkeep.engine.verify.gate import Findings, Gate  # noqa: E402
from kvkeep.engine.verify.scenarios import Ask, Scenario, Sizes, Waves  # noqa: E402
from kvkeep.engine.verify.strict import FromScratch  # noqa: E402
from kvkeep.engine.verify.tiers import host_scenarios, suspension_scenarios  # noqa: E402
from kvkeep.index.names import TokenIds  # noqa: E402
from kvkeep.lease import Lease  # noqa: E402
from kvkeep.parking import Parking  # noqa: E402
from kvkeep.traffic import Suspended  # noqa: E402
from kvkeep.transfer.backend import Job  # noqa: E402
from kvkeep.transfer.host import HostBackend  # noqa: E402

MODES = ("strict", "same-schedule")


@pytest.mark.parametrize("mode", ["strict", pytest.param("same-schedule", marks=pytest.mark.slow)])
def test_the_gate_passes_on_the_real_thing(mode: str, kvkeep: Run, tmp_path: Path):
    """Over all scenarios nothing differs; pages were dropped, requests preempted, and every hit length occurred."""
    done = kvkeep("verify", *TINY, "--mode", mode, "--json", "out.json")
    assert (0, "") == (done.returncode, done.stderr), done.stdout
    got = json.loads((tmp_path / "out.json").read_text())
    value = {name: metric["value"] for name, metric in got["metrics"].items()}
    assert ("verify", True) == (got["command"], got["ok"])
    assert (0, 0, 0) == (value["mismatches"], value["wrong_matches"], value["untested"])
    assert int(mode == "strict") == value["strict"]
    assert value["strict_cost_ratio"] > 0
    assert value["cases"] == len(got["rows"]) >= 60
    assert value["pages_evicted"] >= 20 and value["preemptions"] >= 1
    assert {0, 16, 32, 48, 64, 80, 96} <= {row["matched_tokens"] for row in got["rows"]}
    assert max(row["output_tokens"] for row in got["rows"]) > 16, "no page was generated whole"
    counted = ["host_hit_pages", "mixed_hits", "room_waits"]
    if mode == "strict":
        counted += ["suspensions", "hole_tokens", "failed_copies", "lost_tokens", "revocations"]
    assert all(value[name] > 0 for name in counted), {name: value[name] for name in counted}
    assert 40 == value["cases_hits_in_host_memory"]
    assert {0, 16, 32, 48, 64, 80, 96} <= {row["matched_host_tokens"] for row in got["rows"]}


def flip_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of one value of a cached page changes when it is handed out."""
    right = TieredCache.admit

    def admit(cache: TieredCache, *arguments: object, **options: object) -> object:
        lease = right(cache, *arguments, **options)  # type: ignore[arg-type]
        if lease.matched_len:
            last_layer = cache.pool.kv.shape[1] - 1
            bits = cache.pool.kv.view(torch.int32)
            bits[lease.pages[lease.matched_len // 16 - 1], last_layer, 1, 15, -1, -1] ^= 1
        return lease

    monkeypatch.setattr(TieredCache, "admit", admit)


def hand_out_a_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    """An off-by-one in what is handed out: the last matched page holds what the page before it holds."""
    right = TieredCache.admit

    def admit(cache: TieredCache, *arguments: object, **options: object) -> object:
        lease = right(cache, *arguments, **options)  # type: ignore[arg-type]
        if lease.matched_len > 16:
            last = lease.matched_len // 16 - 1
            cache.pool.kv[lease.pages[last]] = cache.pool.kv[lease.pages[last - 1]]
        return lease

    monkeypatch.setattr(TieredCache, "admit", admit)


def leave_half_of_a_load_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last page of each load does not arrive, and nobody says so."""
    right = HostBackend.launch

    def launch(backend: HostBackend, job: Job) -> None:
        plan = job.plan
        if plan.cause == "promote":
            plan.sources[-1] = plan.sources[0] if len(plan) > 1 else 1 - min(plan.sources[0], 1)
        right(backend, job)

    monkeypatch.setattr(HostBackend, "launch", launch)


def mix_up_suspended_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed request gets its own pages in another order."""
    right = Parking.resume

    def resume(parking: Parking, ticket: Suspended, slots: "array[int]", gpu: "array[int]", lease: Lease) -> bool:
        return right(parking, ticket, slots[::-1], gpu, lease)

    monkeypatch.setattr(Parking, "resume", resume)


def leave_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed request takes what it shared for still there."""
    right = TieredCache.resume

    def resume(cache: TieredCache, ticket: Suspended, tokens: TokenIds) -> Lease:
        lease = right(cache, ticket, tokens)
        lease.holes = []
        return lease

    monkeypatch.setattr(TieredCache, "resume", resume)


def overwrite_kept_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept page is written to after its request has ended, as by a late copy."""
    right = TieredCache.finish

    def finish(cache: TieredCache, lease: object, kv_len: int) -> None:
        first: int = lease.pages[0]  # type: ignore[attr-defined]
        right(cache, lease, kv_len)  # type: ignore[arg-type]
        cache.pool.kv[first, 0, 0, 3] += 1e-3

    monkeypatch.setattr(TieredCache, "finish", finish)


def find_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that never finds anything is exact, and useless: the gate must not pass it."""
    right = TieredCache.admit

    def admit(cache: TieredCache, *arguments: object, **options: object) -> object:
        return right(cache, *arguments, **{**options, "reuse": False})  # type: ignore[arg-type]

    monkeypatch.setattr(TieredCache, "admit", admit)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("plant", [flip_a_bit, hand_out_a_neighbour, overwrite_kept_pages])
def test_the_gate_fails_on_a_wrong_page(
    mode: str,
    plant: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    one_thread: None,
):
    """A wrong byte or a wrong page ends in exit code 1, with the request, the layer and the position it was seen at."""
    plant(monkeypatch)
    assert 1 == cli.main(["verify", *TINY, "--mode", mode, "--cases", "12", "--json", str(tmp_path / "out.json")])
    got = json.loads((tmp_path / "out.json").read_text())
    assert not got["ok"]
    assert got["metrics"]["mismatches"]["value"] > 0
    assert 0 == got["metrics"]["strict"]["value"]
    first = next(row for row in got["rows"] if row["mismatch"])
    assert first["differs"] in ("K", "V") and first["layer"] is not None
    assert f"request {first['request']}: {first['differs']} differs at layer {first['layer']}, position" in (
        capsys.readouterr().out
    )


TIERS: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (leave_half_of_a_load_behind, "hits in host memory"),
    (mix_up_suspended_pages, "suspended"),
    (leave_holes, "suspended"),
]


@pytest.mark.parametrize(("plant", "name"), TIERS)
def test_the_gate_fails_on_a_page_that_came_back_wrong(
    plant: Callable[[pytest.MonkeyPatch], None],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    one_thread: None,
):
    """What a load or a resumption brings, and what it leaves out: each shows in the bits."""
    loaded, sizes, findings = load_model("stories260k"), Sizes(16, 6), Findings()
    rng = random.Random(1)
    planned = [*host_scenarios(sizes, lambda n: random_ids(rng, loaded, n))]
    planned += suspension_scenarios(sizes, lambda n: random_ids(rng, loaded, n))
    scenario = next(scenario for scenario in planned if scenario.name == name)
    plant(monkeypatch)
    Gate(loaded, 16, strict=True, judge=FromScratch(loaded, 16, 8), findings=findings).run([scenario], cases_max=99)
    assert findings.mismatches > 0


def test_the_first_difference_is_the_one_that_was_planted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, one_thread: None
):
    """A flipped bit in the last layer's V of the last matched position is reported at that layer and position."""
    flip_a_bit(monkeypatch)
    assert 1 == cli.main(["verify", *TINY, "--cases", "2", "--json", str(tmp_path / "out.json")])
    row = json.loads((tmp_path / "out.json").read_text())["rows"][1]
    assert (96, "V", 4, 95) == (row["matched_tokens"], row["differs"], row["layer"], row["position"])


@pytest.mark.parametrize("mode", MODES)
def test_a_cache_that_finds_nothing_does_not_pass(
    mode: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], one_thread: None
):
    """Nothing differs when nothing is reused; the gate still fails, because hits it asked for did not happen."""
    find_nothing(monkeypatch)
    assert 1 == cli.main(["verify", *TINY, "--mode", mode, "--cases", "12"])
    assert "0 tokens came from the cache where 96 had to" in capsys.readouterr().out


def test_a_scenario_that_did_not_get_to_its_point_is_reported(one_thread: None):
    """A scenario that is there to drop pages, run in an ample pool, is listed as untested."""

    def waves() -> Waves:
        yield [Ask(list(range(1, 40)), new=2)]

    loaded, findings = load_model("stories260k"), Findings()
    gate = Gate(loaded, 16, strict=True, judge=FromScratch(loaded, 16, 8), findings=findings)
    gate.run([Scenario("roomy", 50, waves, Counts(pages_evicted=1, preemptions=1))], cases_max=9)
    assert (1, 0) == (len(findings.cases), findings.mismatches)
    assert 2 == len(findings.untested) and "roomy" in findings.untested[0]


def test_bits_are_compared_not_values():
    """A NaN equals itself; 0.0 and -0.0 differ; the lowest layer of the first position is named."""
    nan = torch.tensor([float("nan"), 1.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    left = torch.zeros(3, 2, 5, 1, 2)
    right = left.clone()
    assert kv_difference(left, right) is None
    right[1, 0, 4] = 1
    right[2, 1, 3, 0, 1] = -0.0
    found = kv_difference(left, right, first_position=100)
    assert found is not None and ("V", 103, 2) == (found.what, found.position, found.layer)
    said = output_difference([5, 6, 7], [5, 9, 7], prompt_len=20)
    assert said is not None and 21 == said.position
