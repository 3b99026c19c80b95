"""Small pools whose pages tell which they are, and plans between them."""

from array import array
from collections.abc import Sequence

import numpy as np

from kvkeep.tiers.layout import PageLayout
from kvkeep.tiers.memory import HostMemory, PageMemory
from kvkeep.transfer.plan import DIRECTION_OF, Cause, Plan, SlotCopy

LAYOUT = PageLayout(layers=3, kv_heads=2, head_dim=4, page_size=2, dtype="float16")
PAGES = 12


def host_memory(pages: int = PAGES, layout: PageLayout = LAYOUT) -> HostMemory:
    """Page-major host memory of zeros."""
    return HostMemory(np.zeros((pages, layout.page_nbytes), dtype=np.uint8), layout)


def content(number: int, layout: PageLayout = LAYOUT) -> bytes:
    """What page content `number` looks like: no two are equal, and no two bytes of one are in the same place."""
    return np.random.default_rng(number).integers(0, 255, layout.page_nbytes, dtype=np.uint8).tobytes()


def fill(memory: PageMemory, page: int, number: int) -> None:
    """Writes content `number` to a page."""
    data = np.frombuffer(content(number), dtype=np.uint8)
    start = 0
    for plane in memory.planes():
        end = start + plane.shape[1]
        if isinstance(plane, np.ndarray):
            plane[page] = data[start:end]
        else:
            plane[page] = plane.new_tensor(data[start:end])
        start = end


def fill_all(memory: PageMemory, pages: int, first: int) -> list[bytes]:
    """Gives every page a content of its own; returns them."""
    for page in range(pages):
        fill(memory, page, first + page)
    return [memory.page_bytes(page) for page in range(pages)]


def plan(cause: Cause, sources: Sequence[int], targets: Sequence[int], *slots: SlotCopy) -> Plan:
    """A plan whose generations are all 0."""
    zeros = array("q", bytes(8 * len(sources)))
    return Plan(DIRECTION_OF[cause], cause, array("i", sources), array("i", targets), zeros, zeros, slots)


def carried_out(what: Plan, device: Sequence[bytes], host: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
    """What pages of the two pools hold after a plan, when this is what they held before."""
    sources, targets = (host, device) if what.direction == "h2d" else (device, host)
    after = [bytearray(page) for page in targets]
    for source, target in zip(what.sources, what.targets, strict=True):
        after[target][:] = sources[source]
    for slot in what.slots:
        for i in range(slot.nbytes):
            after[slot.target][slot.target_offset + i] = sources[slot.source][slot.source_offset + i]
    written = [bytes(page) for page in after]
    return (written, list(host)) if what.direction == "h2d" else (list(device), written)


class Flag:
    """An event that a test sets."""

    def __init__(self, done: bool = False) -> None:
        self.done = done

    def query(self) -> bool:
        """Whether it has been set."""
        return self.done
