"""Which replica a key prefers: all of them, in an order that each router computes alike.

Must not know prompts, loads or addresses: a replica is its id, a string.

Rendezvous hashing (Thaler and Ravishankar, 1998): every replica scores each key, a key's order is that of
its scores.
A replica that leaves takes only the keys that ranked it first; one that joins gets only those that now do.
"""

from collections.abc import Iterable

from kvkeep.index.names import hash64


def ranked(key: int, replicas: Iterable[str]) -> list[str]:
    """The replicas from the most to the least preferred one, whatever order they are given in.

    key: 64 bits.   replicas: their ids, each once.
    """
    return sorted(replicas, key=lambda replica: (-hash64(replica.encode(), key), replica))
