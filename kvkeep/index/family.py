"""How runs hang together: parents, children by the name of their first page, and siblings of equal name.

Must not know roots, tiers or what a run holds.
"""

from collections.abc import Iterator

from kvkeep.index.run import Run


def parent_of(run: Run) -> Run:
    """The run (or root) before a run that is not a root."""
    assert run.parent is not None
    return run.parent


def add_child(parent: Run, child: Run) -> None:
    """Hangs a new run, which has GPU copies, behind `parent`."""
    if parent.children is None:
        parent.children = {}
    child.sibling = parent.children.get(child.key)
    parent.children[child.key] = child
    parent.gpu_children += 1


def replace_child(run: Run, new: Run | None) -> None:
    """Puts `new`, or else the sibling behind it, in `run`'s place among its parent's children."""
    children = parent_of(run).children
    assert children is not None
    if new is not None:
        new.sibling = run.sibling
    after = new if new is not None else run.sibling
    at = children[run.key]
    if at is run:
        if after is None:
            del children[run.key]
        else:
            children[run.key] = after
        return
    while at.sibling is not run:
        at = at.sibling  # type: ignore[assignment]  # `run` is in its bucket
    at.sibling = after


def children_of(run: Run) -> Iterator[Run]:
    """Every child of `run`."""
    for child in list((run.children or {}).values()):
        at: Run | None = child
        while at is not None:
            yield at
            at = at.sibling


def below(run: Run) -> Iterator[Run]:
    """Every run behind `run`, parents first."""
    todo = [run]
    while todo:
        for child in children_of(todo.pop()):
            yield child
            todo.append(child)
