"""Encoder outputs in the run tree: runs of their own, found by a record that is compared in full.

Must not know what the bytes mean, nor who computes them.

    root (one for each encoder)  --name of the record-->  Output: pages, then a slot for the rest
                                                            | sibling of equal name

An output leaves, moves and is loaded like any other run, but as a whole: part of one is of no use.
"""

from array import array
from typing import Any, NamedTuple

from kvkeep.index.family import children_of
from kvkeep.index.hints import Hint
from kvkeep.index.names import Hash64, Identity, frame, hash64
from kvkeep.index.run import Run
from kvkeep.index.runs import Place, RunTree
from kvkeep.index.uses import Began, Use


class Tensor(NamedTuple):
    """One tensor of an output: its bytes are `nbytes` from `offset` on.   dtype: as torch calls it, "float16"."""

    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


#: Shape and dtype of each tensor.
Shapes = tuple[tuple[tuple[int, ...], str], ...]


def shapes_of(tensors: tuple[Tensor, ...]) -> Shapes:
    """What a caller may expect of an output."""
    return tuple((t.shape, t.dtype) for t in tensors)


class Output(Run):
    """A run whose entries are the pages of one output; a slot (the last one, if there is one) has the rest.

    record: what it is found by.   tensors: what its bytes are.   seconds: what computing it took.
    holds: occurrences in live requests, since `began`.   use, hint: what an order that learns knows of its last use.
    """

    __slots__ = ("began", "hint", "holds", "record", "seconds", "tensors", "use")

    whole = True

    def __init__(self, parent: Run, key: int, serial: int, record: bytes, tensors: tuple[Tensor, ...]) -> None:
        super().__init__(parent, 0, key, serial)
        self.record = record
        self.tensors = tensors
        self.seconds = 0.0
        self.holds = 0
        self.began: Began | None = None
        self.use: Use | None = None
        self.hint: Hint | None = None

    @property
    def nbytes(self) -> int:
        """Bytes from the first tensor's first to the last one's last."""
        return max((t.offset + t.nbytes for t in self.tensors), default=0)


def encoder_identity(fingerprint: bytes, salt: bytes, hash_fn: Hash64 = hash64) -> Identity:
    """The root of one encoder's outputs, which no chain of tokens shares."""
    record = frame((("encoder", fingerprint), ("salt", salt)))
    return Identity(record, hash_fn(record, 0))


def find_output(tree: RunTree, identity: Identity, record: bytes) -> Output | None:
    """The output of that record, on whichever tier."""
    at: Any = tree.child(identity, tree.hash_fn(record, identity.name))
    while at is not None and at.record != record:
        at = at.sibling
    return at  # type: ignore[no-any-return]  # below an encoder's root there are outputs only


def insert_output(
    tree: RunTree, identity: Identity, record: bytes, tensors: tuple[Tensor, ...], pages: "array[int]"
) -> Output:
    """Adds an output on READY pages (and a slot) that the index does not own yet; there is none of that record."""
    root = tree.root(identity)
    run = Output(root.run, tree.hash_fn(record, identity.name), tree.next_serial(), record, tensors)
    tree.gpu.ledger.keep(pages)
    tree.hang(root.run, run)
    run.names = array("Q", (run.key,)) * len(pages)
    run.pages = pages[:]
    run.ends, run.stamps = [len(pages)], [0]
    tree.gpu.put(pages, run, 0)
    tree.touch(Place(run, run.end))
    return run


def outputs_in(tree: RunTree) -> list[Output]:
    """Every output, on whichever tier.  O(outputs and roots): a root has outputs only, or none."""
    found: list[Output] = []
    for root in tree.roots:
        for run in children_of(root):
            if not isinstance(run, Output):
                break
            found.append(run)
    return found
