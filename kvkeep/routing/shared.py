"""Which prefixes are everybody's: learned from counts, so that they do not decide where a request goes.

Must not know replicas, loads or page bytes: a prompt is the names of its first pages.

If the first page decided, all who have the same system prompt would meet on one replica.  What tells requests apart is
the page behind the deepest prefix that many share.  Recent prompts lie in a radix tree over page names; a node is where
prompts part.  A node is *common* when enough of the traffic passes through it and parts there into enough branches: its
prefix, and all that it begins with, is worth holding on every replica; what decides is the name of the page behind it.

    root --- system prompt (common) --+-- question, turn, turn ...      a session: its first own page decides, and stays
                                      |                                 the same when the session grows
                                      +-- a document --+-- question     few share it: they stay together
                                      |                +-- question
                                      +-- ...

Nothing here goes stale: it says how prompts branch, not what a replica holds.  A prefix that becomes common, or ceases
to be, moves the prompts behind it once; a prompt that moves misses once.
"""

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

#: Of all requests.  A sixty-fourth is a quarter of what each of 16 replicas gets: what is finer, hashing balances.
SHARE_MIN = 1 / 64
#: A common prefix stays so until it has less than this part of that share: one that sways moves nobody to and fro.
SHARE_KEPT = 1 / 4
#: Branches.  Fewer are a session that was tried again, or its sub-agents, and belong together.
FANOUT_MIN = 8
#: Requests after which a count is worth half.
HALF_LIFE = 1024
#: Prompts remembered, and pages of each: 8 bytes a page.
LEAVES_MAX = 4096
DEPTH_MAX = 256
#: New prompts after which it is worth half whether one came back, and how many are believed to have at the start.
RETURNS_HALF_LIFE, RETURNS_AT_START = 256, 64


class Seen(NamedTuple):
    """What is known of a prompt.

    common: how many of its pages are a common prefix, or the beginning of one.
    returns: how likely it is that what follows those is met again: 1.0 where it was seen before.
    """

    common: int
    returns: float


class Node:
    """A stretch of page names at the end of which known prompts part; at a leaf one prompt ends, as far as it grew.

    names: of its pages.   children: by their first name.   count, at: requests that passed, halved every HALF_LIFE, as
    it was at request number `at`.   common: see above.   commons: how many of it and those below it are.
    met: a leaf's prompt came more than once.
    """

    __slots__ = ("at", "children", "common", "commons", "count", "met", "names", "parent")

    def __init__(self, parent: "Node | None", names: "array[int]", count: float, at: int) -> None:
        self.parent = parent
        self.names = names
        self.children: dict[int, Node] = {}
        self.count = count
        self.at = at
        self.common = self.met = False
        self.commons = 0

    def visit(self, now: int) -> None:
        """Counts one request more."""
        self.count = self.count * 0.5 ** ((now - self.at) / HALF_LIFE) + 1.0
        self.at = now


class SharedPrefixes:
    """What recent prompts have in common.  Equal sequences of prompts give equal answers."""

    def __init__(self, leaves_max: int = LEAVES_MAX, depth_max: int = DEPTH_MAX) -> None:
        self.depth_max = depth_max
        self._leaves_max = leaves_max
        self._root = Node(None, array("Q"), 0.0, 0)
        self._root.common = True
        self._leaves: OrderedDict[Node, None] = OrderedDict()  # seen longest ago first
        self._now = 0
        self._began = self._came_back = float(RETURNS_AT_START)

    def __len__(self) -> int:
        """Prompts remembered."""
        return len(self._leaves)

    def learn(self, names: Sequence[int]) -> Seen:
        """Counts a prompt, and tells what is known of it.

        names: of its full pages from the first one on; those beyond `depth_max` are not looked at.
        """
        path = array("Q", names[: self.depth_max])
        self._now += 1
        node, depth, common, returns = self._root, 0, 0, 1.0
        node.visit(self._now)
        while depth < len(path):
            child = node.children.get(path[depth])
            if child is None:
                if depth == common:
                    returns = self._came_back / self._began
                self._add_leaf(node, path[depth:])
                break
            equal = _equal(child.names, path, depth)
            if equal < len(child.names) and depth + equal < len(path):
                child = self._part(child, equal)
            depth += equal
            child.visit(self._now)
            if not child.children:
                child.names += path[depth:]  # a session grows
                self._meet(child)
                break
            if self._is_common(child):
                common = depth
            if depth == len(path) and equal < len(child.names):
                break  # it ends in the middle of a stretch
            node = child
        self._forget()
        return Seen(common, returns)

    # ------------------------------------------------------------------ counts

    def _is_common(self, node: Node) -> bool:
        """Decides it anew: a prefix is, and what one begins with, which is held wherever that is."""
        share = node.count / self._root.count
        if node.common:
            self._set_common(node, share >= SHARE_MIN * SHARE_KEPT)
        else:
            self._set_common(node, share >= SHARE_MIN and len(node.children) >= FANOUT_MIN)
        return node.commons > 0 and share >= SHARE_MIN * SHARE_KEPT  # those below may be judged long ago

    def _set_common(self, node: Node, common: bool) -> None:
        if common == node.common:
            return
        node.common = common
        above: Node | None = node
        while above is not None:
            above.commons += 1 if common else -1
            above = above.parent

    def _meet(self, leaf: Node) -> None:
        self._leaves.move_to_end(leaf)
        if not leaf.met:
            leaf.met = True
            self._came_back += 1.0

    # ------------------------------------------------------------------ the tree

    def _add_leaf(self, parent: Node, names: "array[int]") -> None:
        leaf = Node(parent, names, 1.0, self._now)
        parent.children[names[0]] = leaf
        self._leaves[leaf] = None
        weight = 0.5 ** (1 / RETURNS_HALF_LIFE)
        self._began = self._began * weight + 1.0
        self._came_back *= weight

    def _part(self, node: Node, length: int) -> Node:
        """Cuts a stretch in two and returns the head; the tail stays what it was, a leaf or its children's parent."""
        assert node.parent is not None
        head = Node(node.parent, node.names[:length], node.count, node.at)
        head.commons = node.commons
        node.parent.children[head.names[0]] = head
        node.parent, node.names = head, node.names[length:]
        head.children[node.names[0]] = node
        return head

    def _forget(self) -> None:
        """Lets the prompts that were seen longest ago go, when there are too many."""
        while len(self._leaves) > self._leaves_max:
            leaf, _ = self._leaves.popitem(last=False)
            parent = leaf.parent
            assert parent is not None
            del parent.children[leaf.names[0]]
            if parent.parent is None:
                continue
            if not parent.children:  # it was common, or it would have been joined with its last child
                self._set_common(parent, False)
                parent.met = True
                self._leaves[parent] = None
                self._leaves.move_to_end(parent, last=False)
            elif len(parent.children) == 1 and not parent.common:
                self._join(parent)

    def _join(self, node: Node) -> None:
        """Makes a stretch and its only child one again."""
        assert node.parent is not None
        (child,) = node.children.values()
        child.names = node.names + child.names
        child.parent = node.parent
        node.parent.children[child.names[0]] = child


def _equal(stretch: "array[int]", path: "array[int]", first: int) -> int:
    """How many names of `stretch` are those of `path` from `first` on.  Equal names have equal ones before them."""
    most = min(len(stretch), len(path) - first)
    return bisect_left(range(most), True, key=lambda i: stretch[i] != path[first + i])
