"""Table: the demo on a terminal, a live table while it runs and a summary at its end.

Must not measure. It redraws only when told to, so that drawing never competes with a measurement.
"""

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvkeep.engine.demo.measure import Turn

COLUMNS = ("session", "turn", "prompt", "on GPU", "in host", "TTFT", "all GPU", "without", "ratio", "output")


class Display:
    """The live table. Leaving it, for whatever reason, leaves the table and a clean terminal behind.

    Where the output is no terminal, each turn is a plain line, printed when it is done.
    """

    def __init__(self, title: str, console: Console) -> None:
        self._title = title
        self._turns: list[Turn] = []
        self._now = ""
        self._console = console
        self._live = Live(console=console, auto_refresh=False, get_renderable=self._picture)

    def __enter__(self) -> "Display":
        if self._console.is_terminal:
            self._live.start(refresh=True)
        else:
            self._print(self._title)
            self._print("  ".join(COLUMNS))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._now = ""
        if self._console.is_terminal:
            self._live.stop()

    def now(self, what: str) -> None:
        """Say what is being measured."""
        self._now = what
        self._refresh()

    def add(self, turn: Turn) -> None:
        """Add a finished turn."""
        self._turns.append(turn)
        self._refresh()
        if not self._console.is_terminal:
            self._print("  ".join(_cells(turn)))

    def _refresh(self) -> None:
        if self._console.is_terminal:
            self._live.refresh()

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)

    def _picture(self) -> RenderableType:
        table = turn_table(self._title, self._turns)
        return Group(table, Text(self._now, style="dim")) if self._now else table


def turn_table(title: str, turns: Sequence[Turn]) -> Table:
    """The finished turns as a table, one row each."""
    table = Table(title=title, title_justify="left")
    for heading in COLUMNS:
        table.add_column(heading, justify="left" if heading in ("session", "output") else "right", no_wrap=True)
    for turn in turns:
        table.add_row(*_cells(turn), style=None if turn.identical else "bold red")
    return table


def _cells(turn: Turn) -> tuple[str, ...]:
    """One turn in the order of COLUMNS."""
    return (
        turn.session.removeprefix("retail-").removesuffix("-baseline"),
        str(turn.turn),
        f"{turn.prompt_tokens:,}",
        f"{turn.matched_tokens - turn.host_tokens:,}",
        f"{turn.host_tokens:,}",
        f"{turn.ttft_kept_ms:,.0f} ms",
        "-" if turn.ttft_ample_ms is None else f"{turn.ttft_ample_ms:,.0f} ms",
        f"{turn.ttft_without_ms:,.0f} ms",
        f"{turn.ratio:.1f} x",
        "same" if turn.identical else "DIFFERS",
    )
