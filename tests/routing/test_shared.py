"""What prompts share: learned as a naive count would have it, in bounded memory, the same from the same prompts."""

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.index.names import hash64
from kvkeep.routing import shared
from kvkeep.routing.shared import Node, Seen, SharedPrefixes


def named(*pages: int) -> list[int]:
    """The chained names of pages with this content."""
    out, parent = [], 0
    for page in pages:
        parent = hash64(page.to_bytes(8, "little"), parent)
        out.append(parent)
    return out


class Naive:
    """Counts every prefix of every prompt on its own, for prompts that all have one length."""

    def __init__(self) -> None:
        self.now, self.prompts = 0, list[list[int]]()
        self.seen: dict[int, tuple[float, int]] = {}
        self.branches: dict[int, set[int]] = {}
        self.common: dict[int, Sequence[int]] = {}
        self.known: set[int] = set()
        self.met: set[int] = set()
        self.began = self.back = 64.0

    def learn(self, names: Sequence[int]) -> Seen:
        self.now += 1
        common, returns = 0, 1.0
        for depth, name in enumerate(names[:-1], 1):
            share = self.count(name) / self.now_all()
            if len(self.branches.setdefault(name, set())) >= 2:
                kept = self.common.pop(name, None) is not None and share >= 1 / 256
                if kept or (share >= 1 / 64 and len(self.branches[name]) >= 8):
                    self.common[name] = names[:depth]
            if share >= 1 / 256 and any(name in prefix for prefix in self.common.values()):
                common = depth
            self.branches[name].add(names[depth])
        if names[-1] not in self.known:
            if names[common] not in self.known:
                returns = self.back / self.began
            self.began = self.began * 0.5 ** (1 / 256) + 1
            self.back *= 0.5 ** (1 / 256)
        elif names[-1] not in self.met:
            self.met.add(names[-1])
            self.back += 1
        self.known.update(names)
        return Seen(common, returns)

    def count(self, name: int) -> float:
        count, at = self.seen.get(name, (0.0, self.now))
        count = count * math.exp2((at - self.now) / 1024) + 1
        self.seen[name] = count, self.now
        return count

    def now_all(self) -> float:
        return (1 - math.exp2(-self.now / 1024)) / (1 - math.exp2(-1 / 1024))


@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(2, 40))
def test_what_is_learned_is_what_counting_every_prefix_finds(seed: int, stems: int, width: int):
    """Prompts with stems that many share, documents that some share, and tails: the same answers as a naive model."""
    rng = random.Random(seed)
    tree, naive = SharedPrefixes(), Naive()
    for _ in range(300):
        stem = [rng.randrange(stems)] * 4
        document = [rng.randrange(rng.choice((2, width)))] * 2
        prompt = named(*stem, *document, rng.randrange(width), 0)
        expected, got = naive.learn(prompt), tree.learn(prompt)
        assert expected.common == got.common
        assert expected.returns == pytest.approx(got.returns)
        check(tree)


def test_a_system_prompt_is_common_once_eight_went_on_differently():
    """Until then its first page decides; from then on the page behind it, and the session's later turns agree."""
    tree = SharedPrefixes()
    sessions = [named(1, 1, 1, 100 + number) for number in range(30)]
    assert [0] * 8 + [3] * 22 == [tree.learn(names).common for names in sessions]
    longer = named(1, 1, 1, 105, 7, 8, 9)
    assert Seen(3, 1.0) == tree.learn(longer) == tree.learn(longer[:5])


def test_a_system_prompt_that_came_alone_first_is_common_too():
    """A prompt that ends where others will part is no branch of its own, and hides none."""
    tree = SharedPrefixes()
    tree.learn(named(1, 1))
    assert 2 == [tree.learn(named(1, 1, 100 + number)).common for number in range(12)][-1]


def test_what_a_common_prefix_begins_with_is_common_too():
    """Who ends within it, or leaves it early, has pages that everybody has: those behind decide, if there are any."""
    tree = SharedPrefixes()
    for number in range(30):
        for variant in (3, 4):
            tree.learn(named(1, 1, 2, variant, variant, 100 + number))
    assert [1, 2, 3, 4] == [tree.learn(named(1, 1, 2, 3)[:depth]).common for depth in (1, 2, 3, 4)]
    assert 2 == tree.learn(named(1, 1, 7, 8)).common
    assert 3 == tree.learn(named(1, 1, 2, 7, 8)).common
    assert 4 == tree.learn(named(1, 1, 2, 3, 7, 8)).common
    check(tree)


def test_what_it_begins_with_is_common_no_longer_than_it_is_asked_for():
    """A common prefix that nobody asks for is not looked at again; its beginning counts by its own share."""
    tree = SharedPrefixes()
    for number in range(30):
        for variant in (3, 4):
            tree.learn(named(1, variant, 100 + number))
    assert 1 == tree.learn(named(1, 5, 6)).common
    for number in range(9_000):
        tree.learn(named(2, number % 700))
    assert 0 == tree.learn(named(1, 5, 6)).common


def test_a_session_that_was_tried_again_stays_together():
    """Seven branches in the middle of a session do not make its beginning common."""
    tree = SharedPrefixes()
    assert {0} == {tree.learn(named(1, 2, 3, 10 + number)).common for number in range(7) for _ in range(50)}


def test_what_few_ask_for_is_not_common():
    """A document with many questions, but less than a sixty-fourth of all requests: its first page decides."""
    tree = SharedPrefixes()
    found = set()
    for number in range(4_000):
        tree.learn(named(1, number))
        if number % 100 == 50:
            found.add(tree.learn(named(1, 1 << 40, number)).common)
    assert {1} == found


def test_a_common_prefix_stays_so_until_its_share_is_a_quarter_of_what_made_it():
    """A share that sways around the threshold moves nobody; a prefix that is no longer used stops being common."""
    tree = SharedPrefixes()
    for number in range(100):
        tree.learn(named(1, number))

    def quiet(requests: int) -> None:
        for number in range(requests):
            tree.learn(named(2, number << 20))

    found = []
    for number in range(8):
        quiet(1_500)
        found.append(tree.learn(named(1, number)).common)
    assert [1, 1] == found[:2] and 0 == found[-1]
    assert sorted(found, reverse=True) == found


def test_how_many_come_back_is_learned():
    """New prompts are believed to come back; where none does, less and less; where all do, again."""
    tree = SharedPrefixes()
    once = [tree.learn(named(number)).returns for number in range(2_000)]
    assert 1.0 == once[0] and once == sorted(once, reverse=True) and once[-1] < 0.01
    twice = [tree.learn(named(1 << 40 | number // 2)).returns for number in range(4_000)]
    assert 0.9 < twice[-2] <= 1.0 and 1.0 == twice[-1]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch):
    """No more prompts than allowed are remembered, no more pages of each, and no node is left without a reason."""
    tree = SharedPrefixes(leaves_max=50, depth_max=20)
    rng = random.Random(7)
    for _ in range(3_000):
        prompt = [rng.randrange(2) for _ in range(rng.randrange(8))] + [
            rng.randrange(40) for _ in range(rng.randrange(40))
        ]
        tree.learn(named(*prompt))
        assert len(tree) <= 50
        check(tree)


@given(st.integers(0, 2**32))
def test_equal_prompts_give_equal_answers(seed: int):
    """Two routers that saw the same requests in the same order agree on each."""
    rng = random.Random(seed)
    prompts = [named(*(rng.randrange(3) for _ in range(rng.randrange(12)))) for _ in range(200)]
    first, second = SharedPrefixes(leaves_max=20), SharedPrefixes(leaves_max=20)
    assert [first.learn(names) for names in prompts] == [second.learn(names) for names in prompts]


def test_prompts_are_looked_at_up_to_a_depth():
    """What begins alike for longer than that is everybody's from end to end, and the rest of the prompt decides."""
    tree = SharedPrefixes(depth_max=4)
    stem = [1, 2, 3]
    for number in range(20):
        tree.learn(named(*stem, number, 5, 6, 7))
    assert 3 == tree.learn(named(*stem, 99, 5)).common
    assert all(len(node.names) <= 4 for node in nodes(tree))
    assert shared.DEPTH_MAX == SharedPrefixes().depth_max


def nodes(tree: SharedPrefixes) -> list[Node]:
    out, left = [], [tree._root]
    while left:
        out.append(left.pop())
        left += out[-1].children.values()
    return out


def check(tree: SharedPrefixes) -> None:
    """It hangs together: stretches are not empty, inner nodes part prompts, leaves are those that may be forgotten."""
    found = nodes(tree)
    for node in found:
        own = node.common and node is not found[0]
        assert node.commons == own + sum(child.commons for child in node.children.values())
    for node in found[1:]:
        assert node.parent is not None and node.parent.children[node.names[0]] is node and len(node.names)
        assert len(node.children) != 1 or node.common or node.at < tree._now
    assert {node for node in found[1:] if not node.children} == set(tree._leaves)
    depths = [sum(len(up.names) for up in _path(leaf)) for leaf in tree._leaves]
    assert all(0 < depth <= tree.depth_max for depth in depths)


def _path(node: Node | None) -> list[Node]:
    out = []
    while node is not None:
        out.append(node)
        node = node.parent
    return out
