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


class Display:
    """The live table. Leaving it, for whatever reason, leaves the table and a clean terminal behind."""

    def __init__(self, title: str, console: Console | None = None) -> None:
        self._title = title
        self._turns: list[Turn] = []
        self._now = ""
        self.console = console or Console()
        self._live = Live(console=self.console, auto_refresh=False, get_renderable=self._picture)

    def __enter__(self) -> "Display":
        self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._now = ""
        self._live.stop()

    def now(self, what: str) -> None:
        """Say what is being measured."""
        self._now = what
        self._live.refresh()

    def add(self, turn: Turn) -> None:
        """Add a finished turn."""
        self._turns.append(turn)
        self._live.refresh()

    def _picture(self) -> RenderableType:
        table = turn_table(self._title, self._turns)
        return Group(table, Text(self._now, style="dim")) if self._now else table


def turn_table(title: str, turns: Sequence[Turn]) -> Table:
    """The finished turns as a table, one row each."""
    table = Table(title=title, title_justify="left", caption_justify="left")
    for heading in (
        "session",
        "turn",
        "prompt tokens",
        "matched",
        "TTFT with",
        "TTFT without",
        "ratio",
        "output",
    ):
        table.add_column(heading, justify="left" if heading in ("session", "output") else "right")
    for turn in turns:
        table.add_row(
            turn.session,
            str(turn.turn),
            f"{turn.prompt_tokens:,}",
            f"{turn.matched_tokens:,}",
            f"{turn.ttft_kept_ms:,.0f} ms",
            f"{turn.ttft_without_ms:,.0f} ms",
            f"{turn.ratio:.1f} x",
            "identical" if turn.identical else Text("DIFFERS", style="bold red"),
        )
    return table
