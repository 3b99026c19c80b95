"""The simulated device writes parts of pages as an engine's stream does."""

import numpy as np
import pytest

from kvkeep.errors import InvariantViolation
from kvkeep.tiers.memory import HostMemory
from kvkeep.transfer.backend import NO_WAIT, After, Job, JobNumber
from kvkeep.transfer.plan import SlotCopy
from kvkeep.transfer.simulated import SimulatedBackend
from tests.sim.device import LAYOUT, NBYTES, Device
from tests.transfer.pools import plan


def test_part_of_a_page_is_written_in_the_stream() -> None:
    """Late, and only those bytes: a copy of them waits for the write, a copy of their neighbours need not."""
    device = Device(4, asynchronous=True)
    host = HostMemory(np.zeros((4, NBYTES), dtype=np.uint8), LAYOUT)
    device.backend = SimulatedBackend(device, host)

    def store(number: int, offset: int, after: After) -> None:
        assert device.backend is not None
        what = plan("demote", [], [], SlotCopy(1, offset, number, 0, 4))
        device.backend.launch(Job(JobNumber(number), what, after, 4, 0.0))

    device.write(1, 4, b"abcd")
    store(0, 0, NO_WAIT)
    store(1, 4, device.event)
    with pytest.raises(InvariantViolation, match="missing barrier"):
        store(2, 7, NO_WAIT)
    assert bytes(4) == bytes(np.asarray(device.read(1, 4, 4)))
    assert device.finish_one()
    assert b"abcd" == bytes(np.asarray(device.read(1, 4, 4)))
    assert bytes(4) + b"abcd" + bytes(NBYTES - 8) == device.page_bytes(1)
    while device.backend.step():
        pass
    assert (bytes(4), b"abcd") == (host.page_bytes(0)[:4], host.page_bytes(1)[:4])
