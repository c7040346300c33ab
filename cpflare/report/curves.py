"""Learning curves: metrics.jsonl read with tolerance for a cut last line, drawn as inline SVG."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpflare.errors import DataError

# Stand-ins that no plot uses otherwise; in the page they become the theme's own colours.
INK, MUTED, GRID = "#010203", "#040506", "#070809"
SERIES = ("#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04")
_THEME = {INK: "--ink", MUTED: "--muted", GRID: "--grid"} | {
    colour: f"--series-{index + 1}" for index, colour in enumerate(SERIES)
}
_MAX_POINTS = 600


@dataclass
class History:
    """The lines of metrics.jsonl: steps, evaluations, and what was odd about them."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def column(self, key: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Steps and values of the lines that have a number under `key`."""
        pairs = [
            (row["step"], row[key]) for row in self.steps if isinstance(row.get(key), int | float)
        ]
        table = np.asarray(pairs, dtype=np.float64).reshape(-1, 2)
        return table[:, 0], table[:, 1]

    def evaluation_keys(self) -> list[str]:
        """Names of the evaluations' equal-cell relative errors, `_sub` for subsamples."""
        keys = dict.fromkeys(key for row in self.evaluations for key in row)
        return [key for key in keys if key.removesuffix("_sub").endswith("_rel_l2")]


def read_history(path: Path) -> History:
    """Read metrics.jsonl; an incomplete last line is left out with a notice.

    A resumed run repeats steps: the later line of a step counts.

    Raises:
        DataError: a line other than the last is no JSON object with a step.
    """
    history = History()
    if not path.is_file():
        history.notices.append(f"{path.name} is absent, so there are no learning curves")
        return history
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    rows: dict[tuple[str, float], dict[str, Any]] = {}
    num_repeated = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            key = (str(row.get("kind", "step")), float(row["step"]))
        except (json.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            if number == len(lines):
                history.notices.append(
                    f"the last line of {path.name} (line {number}) is incomplete and was left out"
                )
                break
            raise DataError(
                f"{path}, line {number} is no record of a step ({line[:60]!r}); delete that line"
            ) from error
        former = rows.get(key, {})
        num_repeated += not former.keys() & row.keys() <= {"kind", "step"}
        # A step may be evaluated twice, on a subsample and whole: both belong to it.
        rows[key] = {**former, **row} if key[0] == "eval" else row
    if num_repeated:
        history.notices.append(
            f"{num_repeated} lines repeat an earlier step, as after a resume; the later ones count"
        )
    for (kind, _), row in sorted(rows.items(), key=lambda item: item[0][1]):
        (history.evaluations if kind == "eval" else history.steps).append(row)
    return history


def thin_out(
    x: NDArray[np.float64], y: NDArray[np.float64], num: int = _MAX_POINTS
) -> tuple[NDArray[np.float64], ...]:
    """Reduce a curve to at most `num` buckets: mean step, mean, least and largest value of each."""
    if len(x) <= num:
        return x, y, y, y
    edges = np.linspace(0, len(x), num + 1).astype(int)[:-1]
    counts = np.diff(np.append(edges, len(x)))
    return (
        np.add.reduceat(x, edges) / counts,
        np.add.reduceat(y, edges) / counts,
        np.minimum.reduceat(y, edges),
        np.maximum.reduceat(y, edges),
    )


def new_axes(title: str, ylabel: str, *, size: tuple[float, float] = (4.6, 2.7)) -> Any:
    """Return (figure, axes) of one small plot in the page's style."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_ylabel(ylabel, fontsize=9, color=MUTED)
    axes.tick_params(which="both", colors=MUTED, labelsize=8.5, length=0)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.patch.set_visible(False)
    return figure, axes


def to_svg(figure: Any, label: str) -> str:
    """Return a figure as inline SVG whose colours follow the page's theme."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": label}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)  # inline SVG needs none in HTML
    # Names of groups repeat from plot to plot; only clip paths and markers are referred to.
    svg = re.sub(r'<g id="[A-Za-z0-9_.]+"', "<g", svg)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px; font-family: inherit", svg)
    for colour, variable in _THEME.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)


def _step_axis(axes: Any) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.set_xlabel("optimiser step", fontsize=9, color=MUTED)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _plain_ticks(axes: Any, values: NDArray[np.float64]) -> None:
    """Use a logarithmic axis where the values span a decade, else few plain ticks."""
    from matplotlib.ticker import MaxNLocator

    positive = values[np.isfinite(values) & (values > 0)]
    if len(positive) == len(values) and positive.max() > 10 * positive.min():
        axes.set_yscale("log")
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.margins(y=0.12)


def draw_curve(
    history: History,
    columns: Sequence[tuple[str, str]],
    title: str,
    unit: str,
    *,
    scale: float = 1.0,
    from_zero: bool = False,
) -> str | None:
    """Draw step columns `(key, legend)` over the steps as SVG; None where no line has them.

    Over 600 steps are averaged in buckets, with the range within each bucket as a band.
    """
    curves = [(key, legend, *history.column(key)) for key, legend in columns]
    curves = [(key, legend, x, y * scale) for key, legend, x, y in curves if len(x)]
    if not curves:
        return None
    figure, axes = new_axes(title, unit)
    for colour, (_, legend, x, y) in zip(SERIES, curves, strict=False):
        steps, mean, low, high = thin_out(x, y)
        if low is not mean:
            axes.fill_between(steps, low, high, color=colour, alpha=0.18, linewidth=0)
        marker = "o" if len(steps) == 1 else None
        axes.plot(steps, mean, color=colour, linewidth=1.4, label=legend, marker=marker)
    if from_zero:
        axes.set_ylim(0, 1.12 * max(float(np.max(y)) for *_, y in curves) or 1.0)
    else:
        _plain_ticks(axes, np.concatenate([y for *_, y in curves]))
    if len(curves) > 1:
        add_legend(axes)
    _step_axis(axes)
    return to_svg(figure, title)


def draw_evaluations(history: History) -> str | None:
    """Draw the evaluations' relative errors over the steps; None where there is none.

    A field has one colour: a line for subsamples, diamonds for whole surfaces.
    """
    figure, axes = new_axes("Validation error", "relative L2")
    values: list[float] = []
    colours: dict[str, str] = {}
    for key in history.evaluation_keys():
        field_name = key.removesuffix("_sub").removesuffix("_rel_l2")
        colour = colours.setdefault(field_name, SERIES[len(colours) % len(SERIES)])
        pairs = [(row["step"], row[key]) for row in history.evaluations if row.get(key) is not None]
        x, y = (np.asarray(side, dtype=np.float64) for side in zip(*pairs, strict=True))
        name = field_name.replace("_", " ")
        if key.endswith("_sub"):
            style = {"linewidth": 1.4, "marker": "o", "markersize": 3.5}
            axes.plot(x, y, color=colour, label=f"{name}, subsample", **style)
        else:
            style = {"linewidth": 0.8, "marker": "D", "markersize": 5.5}
            axes.plot(x, y, color=colour, label=f"{name}, whole surfaces", **style)
        values += y.tolist()
    if not values:
        return None
    _plain_ticks(axes, np.asarray(values))
    add_legend(axes)
    _step_axis(axes)
    return to_svg(figure, "Validation error")


def add_legend(axes: Any) -> None:
    """Add a frameless legend in the page's ink."""
    legend = axes.legend(frameon=False, fontsize=8.5, handlelength=1.4, loc="best")
    for text in legend.get_texts():
        text.set_color(INK)
