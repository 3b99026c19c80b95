"""The page: headline, figures, tables, and what was left out, as one HTML document that loads nothing.

Must not know what a figure shows.
"""

from collections.abc import Sequence
from html import escape

from kvkeep import __version__
from kvkeep.reporting.figure import Figure, LeftOut
from kvkeep.reporting.headline import metric_tables, tiles
from kvkeep.reporting.inputs import Inputs, Origin, origin, origin_of_trace
from kvkeep.reporting.style import CSS, SCRIPT

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(inputs: Inputs, figures: Sequence[Figure | LeftOut]) -> str:
    """The document."""
    shown = [figure for figure in figures if isinstance(figure, Figure)]
    absent = [f"<b>{escape(one.title)}</b>: {_code(one.reason)}" for one in figures if isinstance(one, LeftOut)]
    found, lacking = tiles(inputs)
    absent = [_code(line) for line in lacking] + absent + [f"{_code(line)}" for line in inputs.skipped]
    head = "".join(tile.to_html() for tile in found)
    links = "".join(f'<a href="#{one.slug}">{escape(one.link)}</a>' for one in shown)
    body = "".join(map(_section, shown))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><meta name="color-scheme" content="light dark">'
        f'<link rel="icon" href="data:,"><title>kvkeep: what was measured</title><style>{CSS}</style></head><body>'
        f'<header><div><h1>What kvkeep brings, and what it costs</h1><p class="sub">{_sub(inputs)}</p></div>'
        '<button id="theme" type="button" hidden>Dark</button></header><main>'
        + (f'<ul class="tiles" aria-label="Headline">{head}</ul>' if head else "")
        + (f'<nav aria-label="Figures">{links}<a href="#metrics">All metrics</a></nav>' if links else "")
        + body
        + _metrics(inputs)
        + _absent(absent)
        + f"</main><footer>kvkeep {escape(__version__)}. Intervals are 95 %. Arrows behind a unit: which way is better."
        f'</footer><div id="tip" role="status" aria-live="off"></div><script>{SCRIPT}</script></body></html>\n'
    )


def _sub(inputs: Inputs) -> str:
    origins = [*map(origin, inputs.results), *map(origin_of_trace, inputs.traces)]
    machines = list(dict.fromkeys(one.machine for one in origins))
    commits = list(dict.fromkeys(_commit(one) for one in origins))
    count = _count(len(inputs.results), "result") + (
        f" and {_count(len(inputs.traces), 'trace')}" if inputs.traces else ""
    )
    where = machines[0] if len(machines) == 1 else f"{len(machines)} machines"
    when = f"commit {commits[0]}" if len(commits) == 1 else f"{len(commits)} commits"
    return escape(f"{count}, {when}, {where}.")


def _section(figure: Figure) -> str:
    key = "".join(f'<li><i class="{kind}"></i>{escape(words)}</li>' for kind, words in figure.key)
    return (
        f'<section id="{figure.slug}"><h2>{escape(figure.title)}</h2><p class="says">{escape(figure.says)}</p>'
        + (f'<ul class="key">{key}</ul>' if key else "")
        + figure.picture
        + (f'<p class="note">{escape(figure.note)}</p>' if figure.note else "")
        + "".join(map(_origin, figure.origins))
        + (f"<details><summary>Numbers</summary>{figure.table.to_html()}</details>" if figure.table else "")
        + "</section>"
    )


def _origin(one: Origin) -> str:
    tail = "; the machine was noisy" if one.noisy else ""
    tail += "; a smoke run: its figures mean little" if one.smoke else ""
    return (
        f'<p class="origin"><code>{escape(one.command)}</code>; commit {_commit(one)}; {escape(one.machine)}{tail}</p>'
    )


def _commit(one: Origin) -> str:
    return escape((one.commit or "unknown")[:12])


def _metrics(inputs: Inputs) -> str:
    parts = [
        f"<details><summary>{escape(results.command)}{' (smoke)' if results.smoke else ''}, "
        f"{len(table.rows)} metrics</summary>{_origin(origin(results))}{table.to_html()}</details>"
        for results, table in metric_tables(inputs)
    ]
    return f'<section id="metrics"><h2>All metrics</h2>{"".join(parts)}</section>' if parts else ""


def _absent(lines: Sequence[str]) -> str:
    if not lines:
        return ""
    items = "".join(f"<li>{line}</li>" for line in lines)
    return f'<section id="absent"><h2>Not in this report</h2><ul class="absent">{items}</ul></section>'


def _code(words: str) -> str:
    """Words between back quotes are code."""
    parts = escape(words).split("`")
    return "".join(f"<code>{part}</code>" if n % 2 else part for n, part in enumerate(parts))


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
