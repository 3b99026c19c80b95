"""A `Rig` with encoder outputs: put, held and let go of by number.

Must not choose anything.
"""

from typing import Any

from kvkeep.index.output import Output, find_output
from tests.sim.outputs import Occurrence, OutputWorld, record_of
from tests.sim.rig import Rig


class OutputRig(Rig):
    """Outputs are of the first encoder and the first form; `outputs` says how many there are."""

    def __init__(self, **setup: Any) -> None:
        super().__init__(**{"outputs": 12, **setup})
        self._outputs = 0

    @property
    def out(self) -> OutputWorld:
        """What operates on outputs."""
        assert self.world.outputs is not None
        return self.world.outputs

    def reserve(self, which: int, form: int = 0) -> Occurrence | None:
        """Room for one; None when that is refused."""
        return self._occurrence("reserve", which, form)

    def find(self, which: int) -> Occurrence | None:
        """One that is cached; None when it is not."""
        return self._occurrence("find", which, None)

    def write(self, occurrence: Occurrence) -> None:
        """Its bytes, and from then on it is found."""
        self.world.do(("output", "write", occurrence.handle))
        if self.world.setup.asynchronous:
            self.world.do(("written",))
        self.world.do(("output", "store", occurrence.handle, 1.0))

    def let_go(self, occurrence: Occurrence) -> None:
        """It ends."""
        self.world.do(("output", "release", occurrence.handle))

    def put(self, which: int) -> bool:
        """One is computed and let go of; False when there is no room."""
        occurrence = self.reserve(which)
        if occurrence is not None:
            self.write(occurrence)
            self.let_go(occurrence)
        return occurrence is not None

    def run(self, which: int) -> Output | None:
        """What the index has of an output."""
        return find_output(self.cache._tree, self.out.identity(0), record_of(which))

    def on_gpu(self, which: int) -> bool:
        """Whether it is there."""
        run = self.run(which)
        return run is not None and bool(run.pages)

    def in_host(self, which: int) -> bool:
        """Whether it is there."""
        run = self.run(which)
        return run is not None and run.host is not None

    def _occurrence(self, what: str, which: int, form: int | None) -> Occurrence | None:
        self._outputs += 1
        self.world.do(("output", what, self._outputs, 0, which, form))
        return self.out.live.get(self._outputs)
