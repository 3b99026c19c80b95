"""Drawing: scales, axes and marks as SVG text.  Colours are names of the page's style, so that light and dark share it.

Must not know what is drawn.  Everything that is text of somebody else is escaped here.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

#: Widths in pixels that each figure is drawn for: the page shows the one that fits.
WIDE, NARROW = 760, 340

#: The sign of a ratio.
TIMES = "\u00d7"

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Scale:
    """Data to pixels.   log: by factors; `low` is above 0 then."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        at = math.log(max(value, self.low)) if self.log else value
        return self.start + (self.end - self.start) * ((at - low) / (high - low) if high > low else 0.5)


def ticks(high: float, wanted: int = 5, low: float = 0.0) -> list[float]:
    """Round numbers from `low` to at least `high`."""
    span = high - low
    if span <= 0:
        return [low, low + 1]
    raw = span / wanted
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw * 0.999)
    first = math.floor(low / step)
    count = math.ceil((high - first * step) / step - 1e-9)
    return [round((first + i) * step, 12) for i in range(count + 1)]


def number(value: float | None, digits: int = 3) -> str:
    """A number as people write it."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if float(value).is_integer():
        return f"{value:.0f}"
    text = f"{value:.{digits}g}"
    return text if "e" not in text else f"{value:.{digits + 3}f}".rstrip("0").rstrip(".")


@dataclass(slots=True)
class Svg:
    """A picture of `width` by `height` pixels, being drawn."""

    width: float
    height: float
    parts: list[str] = field(default_factory=list)

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str = "grid") -> None:
        """A straight line."""
        self.parts.append(f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')

    def path(self, points: Sequence[Point], kind: str) -> None:
        """A line through points."""
        self.parts.append(f'<polyline class="{kind}" points="{_points(points)}"/>')

    def area(self, points: Sequence[Point], kind: str) -> None:
        """What a line goes around."""
        self.parts.append(f'<polygon class="{kind}" points="{_points(points)}"/>')

    def rect(self, x: float, y: float, w: float, h: float, kind: str, tip: str = "", round_by: float = 0) -> None:
        """A bar.   tip: said when it is pointed at."""
        rx = f' rx="{round_by:g}"' if round_by else ""
        self.parts.append(
            f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{max(w, 0.6):.1f}" height="{h:.1f}"{rx}{_tip(tip)}/>'
        )

    def dot(self, x: float, y: float, r: float, kind: str, tip: str = "") -> None:
        """A point."""
        self.parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{r:g}"{_tip(tip)}/>')

    def text(self, x: float, y: float, words: str, kind: str = "label", anchor: str = "start") -> None:
        """Words, from their base line."""
        at = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self.parts.append(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}"{at}>{escape(words)}</text>')

    def y_axis(self, scale: Scale, values: Iterable[float], left: float, right: float, say: "Say") -> None:
        """Lines across, with their values beside them."""
        for value in values:
            y = scale(value)
            self.line(left, y, right, y, "zero" if value == 0 else "grid")
            self.text(left - 6, y + 4, say(value), "tick", "end")

    def x_axis(self, scale: Scale, values: Iterable[float], bottom: float, say: "Say") -> None:
        """Values below."""
        for value in values:
            x = scale(value)
            self.line(x, bottom, x, bottom + 4, "zero")
            anchor = "end" if x > self.width - 14 else "middle"
            self.text(x, bottom + 17, say(value), "tick", anchor)

    def to_html(self, title: str, desc: str, kind: str) -> str:
        """The element.   kind: "wide" or "narrow"."""
        return (
            f'<svg class="{kind}" role="img" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'width="{self.width:g}" height="{self.height:g}">'
            f"<title>{escape(title)}</title><desc>{escape(desc)}</desc>{''.join(self.parts)}</svg>"
        )


class Say:
    """How a value is written on an axis.   unit: put behind it; factor: applied before."""

    def __init__(self, unit: str = "", factor: float = 1.0) -> None:
        self._unit, self._factor = unit, factor

    def __call__(self, value: float) -> str:
        return f"{number(value * self._factor)}{self._unit}"


PERCENT = Say(" %", 100)
PLAIN = Say()


def apart(wanted: Sequence[float], least: float, low: float, high: float) -> list[float]:
    """Places near the wanted ones, `least` pixels from each other, in the same order of height."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    places = [0.0] * len(wanted)
    at = low - least
    for i in order:
        at = places[i] = max(wanted[i], at + least)
    over = at - high
    top = high
    for i in reversed(order):
        if over <= 0:
            break
        places[i] = min(places[i], top)
        top = places[i] - least
    return places


def _points(points: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _tip(words: str) -> str:
    return f' data-tip="{escape(words)}"' if words else ""
