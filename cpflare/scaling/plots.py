"""A study's pictures and pages: PNG plots, CSV, markdown, and a self-contained HTML page."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from cpflare.files import written_aside
from cpflare.report.style import CSS
from cpflare.scaling.efficiency import Row, summarise
from cpflare.scaling.study import Study
from cpflare.scaling.table import (
    NOTES,
    describe,
    reading_table,
    table,
    to_csv,
    to_markdown,
)

_COLOURS = ("#1f5fa8", "#c2571a", "#2c8a57", "#8a4fb0", "#5a6472", "#b3263a", "#0e7c86", "#9a7b00")
_IDEAL = "#8a929c"


def write_study(study: Study, folder: Path) -> list[Path]:
    """Write study.csv, study.md, study.png and study.html beside study.json; returns the paths."""
    rows = summarise(study)
    picture = draw_study(rows)
    texts = {
        "study.csv": to_csv(rows).encode(),
        "study.md": to_markdown(study).encode(),
        "study.png": picture,
        "study.html": to_html(study, rows, picture).encode(),
    }
    paths = []
    for name, data in texts.items():
        path = folder / name
        with written_aside(path) as aside:
            aside.write_bytes(data)
        paths.append(path)
    return paths


def draw_study(rows: Sequence[Row]) -> bytes:
    """Step time, time efficiency and memory efficiency over the ranks, with the ideal. PNG."""
    import io

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves = _curves(rows)
    figure = Figure(figsize=(13.0, 4.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    time_axes, time_eff, memory_eff = figure.subplots(1, 3)
    ranks = sorted({row.point.ranks for row in rows})
    for index, (name, curve) in enumerate(curves.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        x = [row.point.ranks for row in curve]
        y = [row.step_s for row in curve]
        spread = [
            [row.step_s - row.step_q1_s for row in curve],
            [row.step_q3_s - row.step_s for row in curve],
        ]
        style: dict[str, Any] = {"color": colour, "marker": "o", "markersize": 5, "linewidth": 1.6}
        time_axes.errorbar(x, y, yerr=spread, label=name, capsize=3, **style)
        if curve[0].point.ranks == 1:
            time_axes.plot(ranks, [y[0] / r for r in ranks], color=colour, ls=":", lw=1.0)
        for axes, key in ((time_eff, "time_efficiency"), (memory_eff, "memory_efficiency")):
            known = [row for row in curve if getattr(row, key) is not None]
            axes.plot(
                [row.point.ranks for row in known], [getattr(row, key) for row in known], **style
            )
    for axes, title, label in (
        (time_axes, "Time of a step (dotted: ideal)", "seconds"),
        (time_eff, "Time efficiency  T₁ / (R·T_R)", ""),
        (memory_eff, "Memory efficiency  M₁ / (R·M_R)", ""),
    ):
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("ranks")
        axes.set_ylabel(label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, [str(r) for r in ranks])
        axes.grid(color="#e4e6e9", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    time_axes.set_yscale("log")
    for axes in (time_eff, memory_eff):
        axes.axhline(1.0, color=_IDEAL, linestyle="--", linewidth=1.0)
        axes.set_ylim(0.0, max(1.1, axes.get_ylim()[1]))
    figure.legend(loc="outside lower center", ncols=2, fontsize=8.5, frameon=False)
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def _curves(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows that differ in nothing but the ranks, each with the single rank in front."""
    curves: dict[str, list[Row]] = {}
    singles = {row.point.family: row for row in rows if row.point.ranks == 1}
    several_sizes = len({row.point.tokens for row in rows}) > 1
    for row in rows:
        point = row.point
        if point.ranks == 1:
            continue
        parts = [point.model, point.method.replace("_", " ")]
        if several_sizes:
            parts.insert(1, f"{point.tokens:,} cells")
        parts += [] if point.link == "one host" else [point.link]
        parts += [] if point.precision == "fp32" else [point.precision]
        parts += [] if point.executor == "in_memory" else [point.executor]
        curve = curves.setdefault(" · ".join(parts), [])
        if not curve and point.family in singles:
            curve.append(singles[point.family])
        curve.append(row)
    shown = {row.point for curve in curves.values() for row in curve}
    for row in rows:
        if row.point not in shown:
            curves[f"{row.point.model} · {row.point.tokens:,} cells"] = [row]
    return curves


def to_html(study: Study, rows: Sequence[Row], picture: bytes) -> str:
    """One page that needs no other file and no network."""
    header, cells = table(rows)
    figures = _table(header, cells)
    reading = reading_table(rows)
    if reading is not None:
        figures += _table(*reading)
    facts = "".join(f"<li>{escape(line)}</li>" for line in describe(study))
    image = base64.b64encode(picture).decode()
    notices = ""
    if any(row.time_efficiency is None for row in rows):
        notices = (
            '<ul class="notices"><li>Some points have no single rank of the same model and size in '
            "this study, so that no efficiency is given.</li></ul>"
        )
    notes = "".join(f'<p class="lead">{escape(note)}</p>' for note in NOTES)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(study.title)}</title>\n<style>{CSS}\nmain {{ max-width: 1500px; }}</style>"
        f"\n</head>\n<body>\n<main>\n<header><h1>{escape(study.title)}</h1></header>\n{notices}"
        f'<ul>{facts}</ul>\n<figure><img alt="step time and efficiencies over ranks" '
        f'src="data:image/png;base64,{image}"></figure>\n{figures}{notes}\n'
        "</main>\n</body>\n</html>\n"
    )


def _table(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in cells
    )
    return (
        f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        "</div>\n"
    )
