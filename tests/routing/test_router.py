"""From a prompt to a replica: what agrees, what must not, what moves, when load counts."""

import os
import random
import subprocess
import sys
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.errors import BadInput, InvariantViolation
from kvkeep.routing import Guard, Router, RoutingSettings

FOUR = ["r0", "r1", "r2", "r3"]
PAGE = 16
SMALL = RoutingSettings(page_size=PAGE)


def prompt(*pages: int, rest: int = 0) -> list[int]:
    """Token ids: a page of each number, and `rest` tokens more."""
    return [page for page in pages for _ in range(PAGE)] + [9] * rest


def test_a_session_stays_where_it_began():
    """However long it grows, and whatever else comes between, while nobody waits."""
    router = Router(FOUR, SMALL)
    for system in range(3):
        for number in range(40):
            router.route(prompt(system, system, 100 + number))
    for number in range(40):
        turns = [prompt(0, 0, 100 + number, *range(turn), rest=turn) for turn in range(6)]
        assert 1 == len({router.route(turn).replica for turn in turns})
        assert {3} == {router.route(turn).pages for turn in turns}


def test_one_system_prompt_does_not_make_one_replica():
    """Once it is known to be common, sessions behind it are spread over all replicas."""
    router = Router(FOUR, SMALL)
    where = Counter(router.route(prompt(1, 2, 3, 1000 + number)).replica for number in range(408))
    assert set(FOUR) == set(where)
    assert all(60 < count < 150 for count in where.values()), where


def test_few_who_share_a_document_meet():
    """Questions about one document go to one replica, those about others elsewhere."""
    router = Router(FOUR, SMALL)
    for number in range(3_000):
        router.route(prompt(1, number))
    where = [
        {router.route(prompt(1, 1 << 20 | document, question)).replica for question in range(5)}
        for document in range(40)
    ]
    assert {1} == {len(replicas) for replicas in where}
    assert 4 == len(set().union(*where))


@pytest.mark.parametrize(
    "other",
    [
        {"salt": b"tenant"},
        {"adapter": b"lora@3"},
    ],
)
def test_salt_and_adapter_are_in_the_key(other: dict[str, Any]):
    """Prompts of other tenants and other adapters share nothing, so they are routed on their own."""
    router = Router(FOUR, SMALL)
    plain, differing = (router.route(prompt(1, 2), **words) for words in ({}, other))
    assert plain.key != differing.key
    assert differing.key == router.route(prompt(1, 2), **other).key


def test_text_and_token_ids_have_keys_of_their_own():
    """Bytes that are equal by chance are not the same prompt."""
    router = Router(FOUR, SMALL)
    ids = np.array(prompt(1, 2), dtype=np.int32)
    assert router.route(ids).key != router.route_bytes(ids.tobytes(), b"text").key
    assert router.route(ids).key == router.route(ids.tolist()).key


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_processes_agree(repo_root: Path, hash_seed: str):
    """A router in another process, told of the replicas in another order, sends each prompt to the same one, and has
    learned the same from the same prompts."""
    script = f"""
from kvkeep.routing import Router, RoutingSettings
router = Router({FOUR[::-1]!r}, RoutingSettings(page_size={PAGE}))
prompts = [[number % 3] * 40 + [number] * 40 for number in range(90)]
routes = [router.route(prompt, salt=b"s") for prompt in prompts * 2]
print([(route.replica, route.pages, route.key) for route in routes])
"""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=repo_root, env=environment, capture_output=True, text=True, check=True
    )
    router = Router(FOUR, SMALL)
    prompts = [[number % 3] * 40 + [number] * 40 for number in range(90)]
    routes = [router.route(prompt, salt=b"s") for prompt in prompts * 2]
    assert {1, 3} == {route.pages for route in routes}
    assert f"{[(route.replica, route.pages, route.key) for route in routes]}\n" == done.stdout


def test_salts_of_strangers_fill_no_memory():
    """A salt or an adapter's name comes from a request, however long: only short ones are remembered."""
    router = Router(FOUR, SMALL)
    salts = [bytes([number]) * 100_000 for number in range(100)]
    tracemalloc.start()
    try:
        keys = {router.route([1, 2], salt=salt + b"!", adapter=salt + b"!").key for salt in salts}
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 100 == len(keys)
    assert held < 1_000_000


# ---------------------------------------------------------------------- replicas come and go


@given(st.integers(0, 2**32), st.integers(2, 6))
def test_leaving_and_joining_move_only_their_share(seed: int, count: int):
    """Keys of a replica that leaves move, and no other; when it is back they come back, and no other moves."""
    rng = random.Random(seed)
    names = [f"http://10.0.0.{number}:80" for number in range(count)]
    gone = rng.choice(names)
    router = Router(names, SMALL)
    prompts = [prompt(rng.randrange(1 << 20), 5) for _ in range(60)]
    before = [router.route(p).replica for p in prompts]
    router.leave(gone)
    without = [router.route(p).replica for p in prompts]
    assert gone not in without
    assert [r for r in before if r != gone] == [r for r, b in zip(without, before, strict=True) if b != gone]
    router.join(gone)
    assert before == [router.route(p).replica for p in prompts]


def test_a_prefix_that_becomes_common_moves_each_prompt_behind_it_once():
    """Prompts behind it move once, to where they stay; all others stay throughout."""
    router = Router(FOUR, SMALL)
    others = [prompt(50 + number, 1) for number in range(30)]
    sessions = [prompt(1, 2, 10 + number) for number in range(12)]
    where = [[router.route(p).replica for p in [*sessions[:rounds], *others]][-30:] for rounds in range(1, 13)]
    assert all(where[0] == later for later in where)
    settled = [router.route(p).replica for p in sessions]
    assert all(settled == [router.route(p).replica for p in sessions] for _ in range(3))


# ---------------------------------------------------------------------- load


def test_who_waits_is_passed_over():
    """The target is left for the next by rank when its queue is over the limit, and goes back to it afterwards."""
    router = Router(FOUR, RoutingSettings(page_size=PAGE, guard=Guard(slack=2, factor=1, ranks=2)))
    ids = prompt(1, 2)
    first, second, *_ = router.route(ids).order
    for _ in range(3):
        assert (first, "target") == (router.route(ids).replica, router.route(ids).reason)
        router.begin(first)
    assert (second, "next") == (router.route(ids).replica, router.route(ids).reason)
    for _ in range(3):
        router.begin(second)
    assert "least" == router.route(ids).reason
    assert router.route(ids).replica not in (first, second)
    router.end(first)
    assert first == router.route(ids).replica


def test_the_limit_is_relative_to_the_others():
    """Where all replicas have long queues the target is kept; two replicas are enough for that."""
    guard = Guard(slack=4, factor=2, ranks=2)
    assert ("a", "target") == guard.choose(["a", "b"], {"a": 44, "b": 20})
    assert ("b", "next") == guard.choose(["a", "b"], {"a": 45, "b": 20})
    assert ("a", "target") == guard.choose(["a"], {"a": 10**6})
    assert ("c", "least") == guard.choose(["a", "b", "c"], {"a": 5, "b": 95})


def test_nothing_is_waited_for_where_there_is_nothing_to_hit():
    """At a worth of 0 the least loaded is taken; at 1 the target may have its queue; an idle target is always taken."""
    guard = Guard(slack=4, factor=2, ranks=2)
    loads = {"a": 3, "b": 2, "c": 1}
    assert "c" == guard.choose(["a", "b", "c"], loads, worth=0.0)[0]
    assert "a" == guard.choose(["a", "b", "c"], loads, worth=1.0)[0]
    assert "a" == guard.choose(["a", "b", "c"], {"b": 1}, worth=0.0)[0]


def test_loads_of_the_caller_count_instead():
    """Queue lengths that are handed in are used, not those that were told by begin and end."""
    router = Router(FOUR, SMALL)
    target = router.route(prompt(1, 2)).replica
    for _ in range(1_000):
        router.begin(target)
    assert target != router.route(prompt(1, 2)).replica
    assert target == router.route(prompt(1, 2), loads={}).replica
    assert target != router.route(prompt(3, 4), loads={target: 10**6}).replica


def test_requests_in_flight_are_counted_across_a_replica_that_comes_and_goes():
    """What waits on a replica that has left still ends there; it is counted again when the replica is back."""
    router = Router(FOUR, SMALL)
    router.begin("r1")
    router.begin("r1")
    router.leave("r1")
    assert {"r0": 0, "r2": 0, "r3": 0} == router.loads
    router.end("r1")
    router.join("r1")
    assert 1 == router.loads["r1"]
    router.end("r1")
    with pytest.raises(InvariantViolation, match="r1"):
        router.end("r1")


# ---------------------------------------------------------------------- short prompts, a depth of one's own, bad input


def test_a_prompt_shorter_than_a_page_goes_to_any_replica_that_is_idle():
    """It has nothing to hit: equal ones agree while nobody waits, different ones are spread."""
    router = Router(FOUR, SMALL)
    short = [[number, 1] for number in range(200)]
    routes = [router.route(ids) for ids in short]
    assert {0} == {route.pages for route in routes}
    assert routes == [router.route(ids) for ids in short]
    assert all(25 < count < 85 for count in Counter(route.replica for route in routes).values())


def test_a_prompt_that_ends_in_what_all_share_is_spread():
    """A first turn whose pages are the system prompt and a few tokens does not meet all others on one replica."""
    router = Router(FOUR, SMALL)
    for number in range(40):
        router.route(prompt(1, 2, 100 + number))
    routes = [router.route([*prompt(1, 2), number]) for number in range(200)]
    assert {0} == {route.pages for route in routes}
    assert set(FOUR) == {route.replica for route in routes}


def test_a_prompt_that_does_not_reach_the_depth_that_is_said_keeps_its_replica():
    """Equal ones have what each other has, so they wait for it as others do; a prompt of no page has nothing."""
    router = Router(FOUR, RoutingSettings(page_size=PAGE, depth=3, guard=Guard(slack=4)))
    for ids, stays in ((prompt(1, 2, rest=5), True), ([1, 2], False)):
        target = router.route(ids).replica
        router.begin(target)
        assert stays == (target == router.route(ids).replica)
        router.end(target)


def test_a_depth_that_is_said_is_kept():
    """With a depth of 3 the third page's name decides, from the first request on; nothing is learned."""
    router = Router(FOUR, RoutingSettings(page_size=PAGE, depth=3))
    assert 1 == len({router.route(prompt(1, 2, 3, number)).key for number in range(50)})
    assert 50 == len({router.route(prompt(1, 2, number, 4)).key for number in range(50)})
    assert {3} == {router.route(prompt(1, 2, 3, number)).pages for number in range(9)}


@pytest.mark.parametrize(
    ("replicas", "settings", "words"),
    [
        ([], {}, "no replica is named"),
        (["a", "a"], {}, "a: it is there already"),
        (["a", ""], {}, "'': its id must be a string"),
        (["a"], {"page_size": 0}, "page_size is 0"),
        (["a"], {"depth": 0}, "depth is 0"),
        (["a"], {"depth": 257}, "depth is 257: it must be 256 pages at most"),
        (["a"], {"guard": Guard(slack=-1)}, "slack is -1"),
        (["a"], {"guard": Guard(factor=float("nan"))}, "factor is nan"),
        (["a"], {"guard": Guard(ranks=0)}, "ranks is 0"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(replicas: list[str], settings: dict[str, object], words: str):
    """Each in a line that names what was wrong."""
    with pytest.raises(BadInput, match=words):
        Router(replicas, RoutingSettings(**settings))  # type: ignore[arg-type]


def test_prompts_that_cannot_be_routed_are_refused():
    """An empty one, one that is no token ids, one when no replica is left; a replica that is not there cannot leave."""
    router = Router(["a"], SMALL)
    for words, bad in (("the prompt is empty", []), ("token id -1 at position 1", [1, -1]), ("integers", ["x"])):
        with pytest.raises(BadInput, match=words):
            router.route(bad)
    with pytest.raises(BadInput, match="salt is str"):
        router.route([1], salt="text")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="b: there is none"):
        router.leave("b")
    router.leave("a")
    with pytest.raises(BadInput, match="no replica is alive"):
        router.route([1])
