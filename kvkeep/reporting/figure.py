"""A figure of the report: what it shows, in words, in a picture for wide and narrow pages, and in a table.

Must not know any figure, nor the page around it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

from kvkeep.reporting.inputs import Origin
from kvkeep.reporting.svg import NARROW, WIDE, Svg

#: A cell with more characters is broken into lines.
LONG = 28

Cell = str | float | int | None


@dataclass(frozen=True, slots=True)
class Table:
    """What stands behind a picture.   head: of the columns; rows: cells, numbers as they are."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    limit: int = 400

    def to_html(self) -> str:
        """The table; long ones end with how many rows are not shown."""
        numeric = [
            all(isinstance(row[i], int | float) or row[i] in (None, "", "-") for row in self.rows)
            for i in range(len(self.head))
        ]
        kinds = [' class="num"' if one else "" for one in numeric]
        head = "".join(
            f'<th scope="col"{kind}>{escape(name)}</th>' for name, kind in zip(self.head, kinds, strict=True)
        )
        body = "".join(
            "<tr>" + "".join(_td(cell, kind) for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
            for row in self.rows[: self.limit]
        )
        more = len(self.rows) - self.limit
        tail = f'<p class="note">{more:,} rows more are in the results.</p>' if more > 0 else ""
        head, body = f"<thead><tr>{head}</tr></thead>", f"<tbody>{body}</tbody>"
        return f'<div class="scroll" tabindex="0"><table>{head}{body}</table></div>{tail}'


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure.

    slug: its address on the page; link: what leads there.   says: the finding, in a sentence.   picture: HTML of it.
    key: what the colours mean, (class, words).   note: how to read it.
    """

    slug: str
    link: str
    title: str
    says: str
    picture: str
    table: Table | None
    origins: Sequence[Origin]
    key: Sequence[tuple[str, str]] = field(default_factory=tuple)
    note: str = ""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A figure that is not there.   reason: what would have to be given."""

    title: str
    reason: str


def drawn(title: str, desc: str, draw: Callable[[float], Svg]) -> str:
    """A picture for wide pages and for narrow ones; the page shows one of them."""
    return "".join(
        draw(width).to_html(title, desc, kind) for width, kind in ((float(WIDE), "wide"), (float(NARROW), "narrow"))
    )


def _td(cell: Cell, kind: str) -> str:
    kind = ' class="long"' if isinstance(cell, str) and len(cell) > LONG else kind
    return f"<td{kind}>{cell_text(cell)}</td>"


def cell_text(cell: Cell) -> str:
    """A cell, escaped."""
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1e5 else f"{cell:,.5g}"
    return escape(cell)
