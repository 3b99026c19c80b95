"""`kvkeep bench vllm_serving` without a server: its workloads, what a perfect cache would match, how passes are judged.

Must not need vLLM: what needs it is in tests/integrations/test_vllm_bench.py.
"""

from copy import deepcopy
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest

from bench._vllm_judging import Row, judge, judge_concurrent, judge_random, lineages, metrics, table
from bench._vllm_workloads import Ask, Workload, block_names, ceiling, clients, rotation
from kvkeep.benching import run_bench
from kvkeep.errors import BadInput

BLOCK = 4


def asks(*prompts: tuple[int, ...]) -> tuple[Ask, ...]:
    return tuple(Ask(session, 0, prompt) for session, prompt in enumerate(prompts))


# ---------------------------------------------------------------------- what is asked


def test_ceiling_is_what_a_cache_without_end_would_match():
    """Full blocks of earlier prompts, up to the first that is new; the last token is computed always."""
    first = tuple(range(10))
    asked = asks(first, (*first[:8], 99), (*first[:8],), (7, *first), (*first[:4], 5, 5, 5, 5, 8, 9))
    assert [0, 8, 4, 0, 4] == ceiling(asked, BLOCK)


def test_ceiling_agrees_with_a_cache_that_keeps_every_prompt():
    """The same by the plain definition: the longest common beginning with any earlier prompt, in full blocks."""
    asked = rotation("smoke", Path()).asks
    expected = []
    for number, one in enumerate(asked):
        common = [0]
        for earlier in asked[:number]:
            pairs = zip(one.prompt, earlier.prompt, strict=False)
            common.append(
                next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one.prompt), len(earlier.prompt)))
            )
        expected.append(min(max(common), len(one.prompt) - 1) // 128 * 128)
    assert expected == ceiling(asked, 128) and any(expected)


def test_block_stands_for_everything_before_it():
    """Equal tokens behind another beginning have another name; a partial block has none."""
    one, other = block_names((1, 2, 3, 4, 5, 6, 7, 8, 9), BLOCK), block_names((0, 2, 3, 4, 5, 6, 7, 8), BLOCK)
    assert 2 == len(one) == len(other) and not set(one) & set(other)
    assert one == block_names((1, 2, 3, 4, 5, 6, 7, 8), BLOCK)


@pytest.mark.parametrize(("name", "sessions", "turns"), [("8x4", 8, 4), ("6x8", 6, 8)])
def test_rotations_are_those_of_the_comparison(shared_dir: Path, name: str, sessions: int, turns: int):
    """So many sessions, a turn of each in rotation, every prompt a beginning of the session's next one; the space of a
    quarter holds the longest request; prompts of 1.3k to 6.5k tokens."""
    made = rotation(name, shared_dir / "traces")
    assert [(session, turn) for turn in range(turns) for session in range(sessions)] == [
        (ask.session, ask.turn) for ask in made.asks
    ]
    by_session = groupby(sorted(made.asks, key=lambda ask: (ask.session, ask.turn)), key=lambda ask: ask.session)
    for _, of_session in by_session:
        prompts = [ask.prompt for ask in of_session]
        assert all(b[: len(a)] == a and len(a) < len(b) for a, b in pairwise(prompts))
    assert 1300 <= min(len(ask.prompt) for ask in made.asks) and max(len(ask.prompt) for ask in made.asks) <= 6500
    assert made.blocks_min(128) <= 1 + made.blocks(128) // 4
    assert made.digest() == rotation(name, shared_dir / "traces").digest()


def test_clients_come_with_recorded_sessions_and_without(shared_dir: Path, tmp_path: Path):
    """20 sessions of 3 turns either way."""
    for folder in (shared_dir / "traces", tmp_path):
        made = clients(folder)
        assert (20, 60) == (len({ask.session for ask in made.asks}), len(made.asks))


# ---------------------------------------------------------------------- how it is judged

WORKLOAD = Workload("some", asks(tuple(range(9)), tuple(range(12)), tuple(range(20))), new_tokens=2)


def one_pass(cached: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """A pass over WORKLOAD, as it is written down."""
    answers = [{"token_ids": [n, n], "ttft_s": 0.1 * (n + 1), "cached_tokens": c} for n, c in enumerate(cached)]
    found = {"vllm:prefix_cache_hits_total": float(sum(cached)), "vllm:external_prefix_cache_hits_total": 0.0}
    out = {"answers": answers, "metrics": found, "ceiling": [0, 8, 12], "repeat": 0, "wall_s": 1.0, "spin_us": 300.0}
    out |= {"cpu_s": 2.0, "pss_peak_nbytes": 1 << 30, "tier_gib": 0.0, "bad_lines": [], "idle": {"kv_usage": 0.0}}
    return out | more


FULL = (0, 8, 12)


def rows_of(passes: dict[str, list[dict[str, Any]]], configuration: str) -> dict[str, Row]:
    return {str(row["metric"]): row for row in judge(WORKLOAD, BLOCK, passes) if row["configuration"] == configuration}


def test_hits_are_held_against_the_ceiling():
    """Both kinds of hits count; 99 % are asked of kvkeep, all of them of ample space."""
    kept = one_pass(FULL, tier_gib=0.1)
    kept["metrics"] |= {"vllm:prefix_cache_hits_total": 8.0, "vllm:external_prefix_cache_hits_total": 12.0}
    passes = {"ample": [one_pass(FULL)], "kvkeep": [kept]}
    rows = rows_of(passes, "kvkeep")
    assert (1.0, True, round(12 / 41, 5)) == (
        rows["of_ceiling"]["value"],
        rows["of_ceiling"]["reached"],
        rows["external_share"]["value"],
    )
    assert rows_of(passes, "ample")["of_ceiling"]["reached"]
    short = rows_of({"ample": [one_pass((0, 8, 8))], "kvkeep": [one_pass((0, 4, 12))]}, "kvkeep")
    assert (0.8, False) == (short["of_ceiling"]["value"], short["of_ceiling"]["reached"])
    assert False is rows_of({"ample": [one_pass((0, 8, 8))]}, "ample")["of_ceiling"]["reached"]


def test_answers_that_tell_other_hits_than_the_metrics_are_seen():
    """Equal sums are asked for."""
    other = one_pass(FULL)
    other["metrics"]["vllm:prefix_cache_hits_total"] = 16.0
    row = rows_of({"quarter": [other]}, "quarter")["tokens_told_apart"]
    assert (4, False) == (row["value"], row["reached"])


def test_times_are_compared_within_a_repeat():
    """The ratio is the median over pairs of the same repeat, at most 1.2 for kvkeep; others are not judged."""
    slow = one_pass(FULL)
    for answer in slow["answers"]:
        answer["ttft_s"] *= 3
    ample = [one_pass(FULL), slow | {"repeat": 1}, one_pass(FULL, repeat=2)]
    kept = [one_pass(FULL), slow | {"repeat": 1}, slow | {"repeat": 2}]
    rows = rows_of({"ample": ample, "kvkeep": kept, "lmcache": kept}, "kvkeep")
    assert ([1.0, 1.0, 3.0], 1.0, True) == tuple(rows["ttft_over_ample"][key] for key in ("all", "value", "reached"))
    assert "reached" not in rows_of({"ample": ample, "lmcache": kept}, "lmcache")["ttft_over_ample"]
    assert False is rows_of({"ample": ample[:1], "kvkeep": [slow]}, "kvkeep")["ttft_over_ample"]["reached"]


def test_memory_is_held_against_vllm_of_the_same_space_and_the_tier():
    """What is left without the tier, over the peak of vLLM alone; at most 1.2."""
    passes = {"quarter": [one_pass(FULL)], "kvkeep": [one_pass(FULL, tier_gib=0.5, pss_peak_nbytes=int(1.75 * 2**30))]}
    row = rows_of(passes, "kvkeep")["memory_over_vllm"]
    assert (1.25, False) == (row["value"], row["reached"])
    passes["kvkeep"][0]["pss_peak_nbytes"] = int(1.6 * 2**30)
    assert rows_of(passes, "kvkeep")["memory_over_vllm"]["reached"]


def test_text_that_differs_is_explained_only_by_other_steps():
    """Where every block came about in the same steps, another text is a fault; where a match was shorter, or a block
    had been computed otherwise before, it is vLLM's arithmetic."""
    other = one_pass(FULL)
    other["answers"][2]["token_ids"] = [7, 7]
    row = rows_of({"ample": [one_pass(FULL)], "kvkeep": [other]}, "kvkeep")["texts_unexplained"]
    assert (1, False, 3) == (row["value"], row["reached"], row["samples"])
    explained = one_pass((0, 4, 12))  # the second request computed a block that the third one reads
    explained["answers"][2]["token_ids"] = [7, 7]
    rows = rows_of({"ample": [one_pass(FULL)], "kvkeep": [explained]}, "kvkeep")
    assert (0, True, 1) == tuple(rows["texts_unexplained"][key] for key in ("value", "reached", "samples"))
    assert pytest.approx(2 / 3, abs=1e-5) == rows["texts_same"]["value"]


def test_lineage_follows_the_blocks():
    """A request that shares no block with one that was computed otherwise has the lineage it had."""
    asked = asks(tuple(range(9)), tuple(range(50, 60)), tuple(range(12)), tuple(range(50, 62)))
    same = lineages(asked, one_pass((0, 0, 8, 8)), BLOCK)
    other = lineages(asked, one_pass((0, 0, 4, 8)), BLOCK)
    assert [True, True, False, True] == [a == b for a, b in zip(same, other, strict=True)]


def test_second_run_of_ample_space_is_compared_with_the_first():
    """vLLM against itself; the first pass is not compared with itself."""
    passes = {"ample": [one_pass(FULL)], "again": [one_pass(FULL)]}
    assert "texts_same" not in rows_of(passes, "ample")
    assert 1.0 == rows_of(passes, "again")["texts_same"]["value"]


def test_what_is_left_behind_is_missed():
    """Errors in the log, blocks in use at idle, loaded bytes that differ."""
    left = one_pass(FULL, bad_lines=["ERROR"], idle={"kv_usage": 0.01})
    left["metrics"] |= {"kvkeep_checked_blocks_total": 5.0, "kvkeep_wrong_blocks_total": 1.0}
    rows = rows_of({"kvkeep-checked": [left]}, "kvkeep-checked")
    missed = {name for name, row in rows.items() if row.get("reached") is False}
    assert {"log_errors", "kv_usage_idle", "wrong_blocks"} == missed
    left["metrics"]["kvkeep_checked_blocks_total"] = 0.0
    assert False is rows_of({"kvkeep-checked": [left]}, "kvkeep-checked")["checked_blocks"]["reached"]


def test_half_a_tier_is_held_against_lru():
    """The order that learns must hit at least what LRU hits."""
    passes = {"kvkeep-half": [one_pass((0, 8, 8))], "kvkeep-half-lru": [one_pass(FULL)]}
    row = rows_of(passes, "kvkeep-half-lru")["hits_rhythm_over_lru"]
    assert (0.8, False) == (row["value"], row["reached"])


STORM: dict[str, Any] = {
    "ended": {"finished": 9, "aborted while decoding": 2, "aborted before a token": 1},
    "failures": [],
    "clients": 4,
    "wall_s": 2.0,
    "cached_tokens": 50,
    "prompt_tokens": 100,
    "bad_lines": [],
    "idle": {
        "kv_usage": 0.0,
        "own": {"kvkeep_pages_total": 8.0, "kvkeep_pages_free": 3.0, "kvkeep_pages_cached": 5.0},
    },
}


def test_all_who_stay_are_served_and_nothing_is_held_afterwards():
    """Requests that were given up do not count; one that failed does, and so does a page of the tier that is gone."""
    assert all(row.get("reached", True) for row in judge_concurrent("kvkeep", STORM))
    broken = deepcopy(STORM)
    broken["ended"]["failed"] = 1
    broken["idle"]["own"]["kvkeep_pages_cached"] = 4.0
    rows = {str(row["metric"]): row for row in judge_concurrent("kvkeep", broken)}
    assert (0.9, False) == (rows["finished_share"]["value"], rows["finished_share"]["reached"])
    assert (1, False) == (rows["tier_pages_away"]["value"], rows["tier_pages_away"]["reached"])
    assert 3 == rows["aborted"]["value"]


def test_random_pairs_are_held_against_equal_servers():
    """As fast as equal servers are of each other at their worst; our share of the steps at most 1 %."""
    own = {"kvkeep_step_seconds_total": 10.0, "kvkeep_scheduler_seconds_total": 0.03, "kvkeep_steps_total": 9.0}
    own["kvkeep_worker_seconds_total"] = 0.05
    one = {"seconds": {"a": [1.0, 1.0], "b": [1.1, 1.0], "kvkeep": [1.1, 1.05]}, "tokens": 100, "bad_lines": []}
    one |= {"metrics": {"kvkeep": own}, "kept": "kvkeep"}
    rows = {str(row["metric"]): row for row in judge_random(one)}
    assert (True, "at least 0.90909") == (
        rows["throughput_over_plain"]["reached"],
        rows["throughput_over_plain"]["limit"],
    )
    assert (0.008, True) == (rows["own_share_of_steps"]["value"], rows["own_share_of_steps"]["reached"])
    own["kvkeep_worker_seconds_total"] = 0.08
    one["seconds"] = {"a": [1.0, 1.0], "b": [1.1, 1.0], "kvkeep": [1.3, 1.3]}
    rows = {str(row["metric"]): row for row in judge_random(one)}
    assert {"throughput_over_plain", "own_share_of_steps"} == {
        n for n, row in rows.items() if row.get("reached") is False
    }


def test_report_has_every_row_that_has_a_value():
    """Metrics are named by workload, configuration and figure; the table has a line each."""
    rows = judge(WORKLOAD, BLOCK, {"ample": [one_pass(FULL)], "quarter": [one_pass((0, 0, 8))]})
    made = metrics(rows)
    assert {"some_ample_of_ceiling", "some_quarter_ttft_over_ample", "some_quarter_hit_share"} <= made.keys()
    assert 1 + len(rows) == len(list(table(rows)))


@pytest.mark.parametrize(
    "arguments",
    [["--repeats", "0"], ["--workload", "9x9"], ["--block-size", "48"], ["--model", "large"], ["--slow"]],
)
def test_bad_options_are_refused(arguments: list[str]):
    """In one line that names the option, before anything is started."""
    with pytest.raises(BadInput, match=arguments[0]):
        run_bench("vllm_serving", arguments)
