"""Rendezvous hashing: the same order everywhere, even shares, and nobody moves but those who must."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.index.names import hash64
from kvkeep.routing.rank import ranked

KEYS = [hash64(b"key", number) for number in range(4_000)]

replica_ids = st.lists(st.text(min_size=1, max_size=12), min_size=2, max_size=9, unique=True)


def test_the_order_is_the_same_on_every_machine():
    """Orders written down once: a router of another release must give them too, or all keys move."""
    replicas = ["http://a:8000", "http://b:8000", "http://c:8000", "http://d:8000"]
    assert ["bdac", "dcab", "bdca", "acdb"] == [
        "".join(replica[7] for replica in ranked(key, replicas)) for key in (0, 1, 2**63, 2**64 - 1)
    ]


@given(replica_ids, st.integers(0, 2**64 - 1))
def test_the_order_does_not_depend_on_how_replicas_are_listed(replicas: list[str], key: int):
    """Two routers that were told of the replicas in different orders agree; each replica is in it once."""
    order = ranked(key, replicas)
    assert order == ranked(key, reversed(replicas)) == ranked(key, sorted(replicas))
    assert sorted(replicas) == sorted(order)


@given(replica_ids, st.integers(0, 2**64 - 1), st.data())
def test_without_a_replica_the_others_keep_their_order(replicas: list[str], key: int, data: st.DataObject):
    """So a key whose replica leaves goes to its next one, and no other key moves; joining is the same backwards."""
    gone = data.draw(st.sampled_from(replicas))
    assert [r for r in ranked(key, replicas) if r != gone] == ranked(key, [r for r in replicas if r != gone])


@pytest.mark.parametrize("count", [2, 3, 8, 16])
def test_keys_are_spread_evenly(count: int):
    """Each replica ranks first for its share of keys, and what a replica leaves is spread over all others."""
    replicas = [f"http://10.0.0.{number}:8000" for number in range(count)]
    first = Counter(ranked(key, replicas)[0] for key in KEYS)
    assert all(abs(first[r] - len(KEYS) / count) < 5 * (len(KEYS) / count) ** 0.5 for r in replicas)
    heirs = Counter(order[1] for order in (ranked(key, replicas) for key in KEYS) if order[0] == replicas[0])
    fair = first[replicas[0]] / (count - 1)
    assert all(abs(heirs[r] - fair) < 5 * fair**0.5 for r in replicas[1:])
