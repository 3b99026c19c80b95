"""The picture: hit curves over the size of the tiers, with what the user has and where the knee is.

Must not compute a share.
"""

from collections.abc import Callable
from html import escape
from io import StringIO
from pathlib import Path

from kvkeep.errors import BadInput
from kvkeep.sizing.sizing import BEST, Sizing, marks

FORMATS = (".png", ".html")

#: Of the marks.
COLOURS = ("tab:red", "tab:green", "tab:orange", "tab:purple", "tab:cyan")


def check_plot(path: Path) -> None:
    """Raises `BadInput` for a file that could not be written, before anything is computed."""
    if path.suffix not in FORMATS:
        raise BadInput(f"--plot {path}: it must end in {' or '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise BadInput(f"--plot {path}: there is no directory {path.parent}; create it or name another file")
    import matplotlib  # noqa: F401  (said now, not after a long pass)


def plot(sizing: Sizing, title: str, amount: Callable[[int], str], path: Path) -> None:
    """Writes the picture.   amount: a size in words."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5), layout="constrained")
    for name, shares in sizing.shares.items():
        percents = [100 * share for share in shares]
        if name == BEST:
            axes.plot(sizing.sizes, percents, label="best possible", linestyle="--", color="0.5")
        else:
            axes.plot(sizing.sizes, percents, label=name, marker="o")
    for colour, (size, what) in zip(COLOURS, marks(sizing), strict=False):
        label = f"{what}: {amount(size)}, {100 * sizing.share(size):.1f} %"
        axes.axvline(size, color=colour, linestyle=":", label=label)
    axes.set_xscale("log", base=2)
    ticks = sizing.octaves[:: max(1, len(sizing.octaves) // 8)]
    axes.set_xticks(ticks, [amount(size) for size in ticks], rotation=20)
    axes.minorticks_off()
    axes.set_ylim(0, 100)
    axes.set_ylabel("hits, % of prompt tokens")
    axes.set_xlabel("cached pages of both tiers together")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    try:
        if path.suffix == ".png":
            figure.savefig(path, dpi=150)
        else:
            picture = StringIO()
            figure.savefig(picture, format="svg")
            svg = picture.getvalue()
            path.write_text(f"<!doctype html>\n<title>{escape(title)}</title>\n{svg[svg.index('<svg') :]}")
    except OSError as error:
        raise BadInput(f"--plot {path}: cannot write ({error.strerror})") from error
    finally:
        pyplot.close(figure)
