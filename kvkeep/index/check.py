"""Does the run tree agree with itself and with the ledgers?  For tests and idle moments.

Must not change anything.
"""

from array import array

from kvkeep.errors import InvariantViolation
from kvkeep.index.eviction import NO_TAIL, Tier, gpu_stamp, host_stamp
from kvkeep.index.family import parent_of
from kvkeep.index.output import Output
from kvkeep.index.run import NOWHERE, Run
from kvkeep.index.runs import RunTree
from kvkeep.index.tiermap import TierMap


def check_tree(tree: RunTree) -> None:
    """Raises `InvariantViolation` when something does not hold.  O(pages)."""
    on_gpu, on_host = 0, 0
    for run in tree.runs():
        on_gpu += len(run.pages)
        _check_run(run)
        _check_map(tree.gpu, run, run.pages)
        if isinstance(run, Output):
            _check_size(tree.gpu, run, run.pages)
        if run.host is not None:
            on_host += sum(h != NOWHERE for h in run.host)
            _check_host(tree, run, run.host)
        elif len(run.pages) != len(run.names):
            raise InvariantViolation(f"tree: run {run.serial} has entries without any copy")
        _check_offered(tree, run)
    _check_count("GPU", tree.gpu, on_gpu)
    if tree.host is not None:
        _check_count("host", tree.host, on_host)
    if any(not root.children for root in tree.roots):
        raise InvariantViolation("tree: a root without children was not dropped")


def _check_count(what: str, tier: TierMap, seen: int) -> None:
    kept = tier.ledger.kept_count
    mapped = len(tier.run_of) - tier.run_of.tolist().count(None)
    if not seen == kept == mapped:
        raise InvariantViolation(f"tree: {seen} {what} pages in runs, {mapped} mapped, {kept} kept by the ledger")


def _check_run(run: Run) -> None:
    n, parent, name = len(run.names), parent_of(run), f"tree: run {run.serial}"
    tokens_per_entry, rest = divmod(len(run.tokens), n or 1)
    if run.whole:
        rest, tokens_per_entry = len(run.tokens) or len(run.pages) not in (0, n) or NOWHERE in (run.host or ()), 1
    if not n or rest or not tokens_per_entry or len(run.pages) > n or run.start != parent.end:
        raise InvariantViolation(f"{name} has arrays of different lengths, or a hole before it")
    if run.key != run.names[0]:
        raise InvariantViolation(f"{name} hangs under another name than its first page's")
    falling = all(a > b for a, b in zip(run.ends, run.ends[1:], strict=False))
    rising = all(a < b for a, b in zip(run.stamps, run.stamps[1:], strict=False))
    if run.ends[0] != run.end or run.ends[-1] <= run.start or not falling or not rising:
        raise InvariantViolation(f"{name} has recency {run.ends} {run.stamps}")
    if parent.names and parent.stamps[0] < run.stamps[-1]:
        raise InvariantViolation(f"{name} was used after the page before it")
    if run.pages and parent.names and len(parent.pages) != len(parent.names):
        raise InvariantViolation(f"{name} has GPU copies behind a page that has none")
    children = []
    for child in (run.children or {}).values():
        at: Run | None = child
        while at is not None:
            children.append(at)
            at = at.sibling
    if run.gpu_children != sum(bool(child.pages) for child in children):
        raise InvariantViolation(f"{name} has miscounted children with GPU copies")


def _check_map(tier: TierMap, run: Run, pages: "array[int]") -> None:
    for i, page in enumerate(pages):
        if page != NOWHERE and (tier.run_of[page] is not run or tier.depth_of[page] != run.start + i):
            raise InvariantViolation(f"tree: page {page} is mapped to another place than run {run.serial}")


def _check_size(tier: TierMap, run: Output, pages: "array[int]") -> None:
    """An output has as many pages as its bytes take, and a slot of the right size for the rest."""
    slots = tier.ledger.slots
    if not pages or slots is None:
        return
    whole, rest = slots.cut(run.nbytes)
    found = tier.ledger.split(pages)[1]
    if len(pages) - len(found) != whole or [rest] * bool(rest) != [slots.place(slot).nbytes for slot in found]:
        raise InvariantViolation(f"tree: output {run.serial} of {run.nbytes} bytes lies in {list(pages)}")


def _check_host(tree: RunTree, run: Run, host: "array[int]") -> None:
    if tree.host is None or len(host) != len(run.names) or NOWHERE in host[len(run.pages) :]:
        raise InvariantViolation(f"tree: run {run.serial} has entries without any copy")
    _check_map(tree.host, run, host)


def _check_offered(tree: RunTree, run: Run) -> None:
    if gpu_stamp(run) != NO_TAIL and not run.queued & Tier.GPU and tree.gpu.ledger.is_idle(run.pages[-1]):
        raise InvariantViolation(f"tree: run {run.serial} has an idle GPU tail and is not on offer")
    if tree.host is None or run.host is None:
        return
    if host_stamp(run) != NO_TAIL and not run.queued & Tier.HOST and tree.host.ledger.is_idle(run.host[-1]):
        raise InvariantViolation(f"tree: run {run.serial} has an idle host tail and is not on offer")
