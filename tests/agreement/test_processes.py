"""Groups of real processes over gloo: the same agreement as in threads, and ranks that die or hang."""

import signal
from pathlib import Path

import pytest

from tests.agreement import scenarios
from tests.agreement.histories import compare
from tests.agreement.processes import DEADLINE_S, SLACK_S, run

MECHANISMS = ("minimum", "leader")


@pytest.mark.parametrize(
    ("size", "mechanism"),
    [
        pytest.param(2, "minimum", marks=pytest.mark.slow),
        (4, "minimum"),
        pytest.param(2, "leader", marks=pytest.mark.slow),
        (4, "leader"),
    ],
)
def test_random_histories_over_gloo(size: int, mechanism: str, tmp_path: Path) -> None:
    """Ranks in processes of their own agree as those in threads do."""
    seeds = range(50_000, 50_008)
    outcomes = run(size, scenarios.histories, mechanism, seeds, scratch=tmp_path)
    assert [(None, 0)] * size == [(o.error, o.code) for o in outcomes]
    for i, seed in enumerate(seeds):
        compare([o.value[i] for o in outcomes], mechanism, seed)


def test_different_settings_are_refused_on_every_rank(tmp_path: Path) -> None:
    """Ranks that start with different settings do not start: the message names rank, setting and both values."""
    by_rank = [{"page_size": 128, "pages": 64}, {"page_size": 64, "pages": 64}]
    outcomes = run(2, scenarios.settings, by_rank, scratch=tmp_path)
    text = "ranks differ: page_size is 64 on rank 1 and 128 on rank 0: they must be equal on every rank"
    assert [("BadInput", text)] * 2 == [o.error for o in outcomes]


def check_noticed(
    size: int, mechanism: str, victim: int, step: str, how: str, scratch: Path, *, tcp: bool = False
) -> None:
    stopped = (victim,) if how == "stop" else ()
    outcomes = run(size, scenarios.life, mechanism, victim, step, how, scratch=scratch, stopped=stopped, tcp=tcp)
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            assert -signal.SIGKILL == outcome.code, outcome
            continue
        assert (None, 0) == (outcome.error, outcome.code), (rank, outcome)
        noticed_s, let_go = outcome.value
        assert noticed_s < DEADLINE_S + SLACK_S, (rank, outcome)
        assert let_go, (rank, outcome)


EVERY = [
    (mechanism, victim, step)
    for mechanism in MECHANISMS
    for victim in (0, 1)
    for step in scenarios.STEPS
    if mechanism == "leader" or step != "the rest"
]


@pytest.mark.parametrize(("mechanism", "victim", "step"), EVERY)
def test_a_rank_that_is_killed_raises_on_the_other(mechanism: str, victim: int, step: str, tmp_path: Path) -> None:
    """Killed before any step, it makes the other raise `RankLost` within the deadline, and let go of its pages."""
    check_noticed(2, mechanism, victim, step, "kill", tmp_path)


@pytest.mark.parametrize(
    ("mechanism", "victim", "step", "how"),
    [
        ("minimum", 2, "admit", "kill"),
        ("minimum", 3, "poll", "stop"),
        ("leader", 0, "the rest", "kill"),
        ("leader", 0, "admit", "stop"),
        ("leader", 2, "extend", "kill"),
    ],
)
def test_all_of_four_notice(mechanism: str, victim: int, step: str, how: str, tmp_path: Path) -> None:
    """The three that are left all raise within the deadline, whether the fourth has died or hangs."""
    check_noticed(4, mechanism, victim, step, how, tmp_path)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_never_joins(victim: int, tmp_path: Path) -> None:
    """A group is not joined without one of its members, and the others hear so within the deadline."""
    outcomes = run(2, scenarios.settings, [{}, {}], scratch=tmp_path, absent=(victim,))
    noticed_s = outcomes[1 - victim].value
    assert isinstance(noticed_s, float) and noticed_s < DEADLINE_S + SLACK_S, outcomes
    assert [0, -signal.SIGKILL] == [outcomes[1 - victim].code, outcomes[victim].code]


@pytest.mark.parametrize("tcp", [False, True])
def test_groups_are_joined_again_whatever_else_a_rank_has_joined(tcp: bool, tmp_path: Path) -> None:
    """A rank's other process groups, and groups that are over, are in nobody's way; and nothing is left of them."""
    outcomes = run(3, scenarios.rejoined, 6, scratch=tmp_path, tcp=tcp)
    assert [(None, 0)] * 3 == [(o.error, o.code) for o in outcomes]
    assert all(more <= 0 for o in outcomes for more in o.value), outcomes


def test_those_that_are_left_can_be_a_group(tmp_path: Path) -> None:
    """After a rank is lost the others join without it."""
    outcomes = run(3, scenarios.survivors, 1, scratch=tmp_path)
    assert [True, None, True] == [o.value for o in outcomes], outcomes


def test_a_world_that_hangs_is_noticed_when_a_group_is_joined(tmp_path: Path) -> None:
    """Rank 0, where all meet, stops before it joins: the others hear so within the deadline."""
    outcomes = run(2, scenarios.settings, [{}, {}], scratch=tmp_path, absent=(0,), stopped=(0,), tcp=True)
    noticed_s = outcomes[1].value
    assert isinstance(noticed_s, float) and noticed_s < DEADLINE_S + SLACK_S, outcomes


def test_the_rank_that_all_met_at_dies(tmp_path: Path) -> None:
    """A store that ends with rank 0 changes nothing: the others hear of it from the group."""
    check_noticed(2, "minimum", 0, "poll", "kill", tmp_path, tcp=True)


def test_blocks_through_device_memory(tmp_path: Path) -> None:
    """NCCL carries them as gloo does, and a rank that dies is noticed as well."""
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a CUDA device for each rank, and there are not two")
    seeds = range(60_000, 60_003)
    outcomes = run(2, scenarios.histories, "leader", seeds, scratch=tmp_path, backend="nccl")
    assert [(None, 0)] * 2 == [(o.error, o.code) for o in outcomes]
    for i, seed in enumerate(seeds):
        compare([o.value[i] for o in outcomes], "leader", seed)
    (again := tmp_path / "again").mkdir()
    outcomes = run(2, scenarios.life, "minimum", 1, "poll", "kill", scratch=again, backend="nccl")
    assert outcomes[0].value is not None and outcomes[0].value[0] < DEADLINE_S + SLACK_S, outcomes


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize(("mechanism", "victim", "step"), EVERY)
def test_all_of_four_notice_in_every_step(mechanism: str, victim: int, step: str, how: str, tmp_path: Path) -> None:
    """The same for every step."""
    check_noticed(4, mechanism, victim, step, how, tmp_path)
