"""One self-contained page about a run: what it was, how it learned, how well it predicts."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

from cpflare.errors import DataError
from cpflare.files import one_line, real, written_aside
from cpflare.models.mixers import mixer_title
from cpflare.report.curves import History, draw_curve, draw_evaluations, read_history
from cpflare.report.plots import draw_parity
from cpflare.report.style import CSS
from cpflare.report.summary import headline_figures, plain
from cpflare.report.tables import number, table

_MAX_PICTURED_CASES = 2
_RENDER_TIMEOUT_S = 600.0
_COEFFICIENTS = ("Cd", "Cl", "Cd_pressure", "Cl_pressure")


def write_report(run_dir: Path, predictions: Path | None = None) -> Path:
    """Write RUN_DIR/report.html and return its path; the page needs no other file and no network.

    `predictions` is the folder that prediction and evaluation wrote to (default:
    RUN_DIR/predictions, if it exists); its metrics.json gives the tables and its VTP files the
    pictures.  What is absent is left out with a notice on the page.

    Raises:
        DataError: the run folder or its config.yaml is absent or damaged, or metrics.jsonl or
            metrics.json is damaged.
    """
    run_dir = Path(run_dir)
    config = _read_config(run_dir)
    history = read_history(run_dir / "metrics.jsonl")
    notices = list(history.notices)
    if predictions is None:
        predictions = run_dir / "predictions"
    elif not Path(predictions).is_dir():
        raise DataError(f"predictions folder {predictions} does not exist; predict into it first")
    metrics = _read_metrics(Path(predictions))
    notices += metrics.get("notices") or []
    notices += _outdated(Path(predictions), metrics)
    body = [
        _header(run_dir, config),
        _summary(run_dir, history, metrics),
        "",  # the notices, once all are known
        _configuration(config),
        _evaluation(metrics),
        _pictures(Path(predictions), metrics, notices),
        _learning(history),
    ]
    body[2] = _notices(notices)
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(real(run_dir).name)} · cpflare report</title>\n"
        f"<style>{CSS}</style>\n</head>\n<body>\n<main>\n{''.join(body)}</main>\n</body>\n</html>\n"
    )
    path = run_dir / "report.html"
    with written_aside(path) as aside:
        aside.write_text(page, encoding="utf-8")
    return path


def _text(value: object) -> str:
    return escape(str(value))


def _read_config(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise DataError(f"run {run_dir} has no config.yaml; give the folder of a training run")
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is damaged: {one_line(error)}") from error
    if not isinstance(config, dict):
        raise DataError(f"{path} holds {type(config).__name__}; a mapping of sections is needed")
    return config


def _read_metrics(predictions: Path) -> dict[str, Any]:
    path = predictions / "metrics.json"
    if not path.is_file():
        return {}
    try:
        metrics: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for key in ("cases", "mean"):
            if not isinstance(metrics[key], dict):
                raise TypeError(f"{key} is no object")
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error}); run `cpflare evaluate` again") from error
    return metrics


def _outdated(predictions: Path, metrics: Mapping[str, Any]) -> list[str]:
    """Say which predictions are newer than the evaluation, so that no one trusts old figures."""
    if not metrics:
        return []
    evaluated = (predictions / "metrics.json").stat().st_mtime
    newer = [
        case
        for case in metrics["cases"]
        for suffix in (".vtp", ".npz")
        if (path := predictions / f"{case}{suffix}").is_file() and path.stat().st_mtime > evaluated
    ]
    if not newer:
        return []
    return [f"predicted after the evaluation, so evaluate again: {', '.join(newer)}"]


def _get(config: Mapping[str, Any], dotted: str, default: Any = None) -> Any:
    value: Any = config
    for key in dotted.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return default
        value = value[key]
    return value


def _header(run_dir: Path, config: Mapping[str, Any]) -> str:
    mixer = mixer_title(str(_get(config, "model.mixer", "model")))
    parts = [
        f"{_get(config, f'model.{key}')} {key}"
        for key in ("blocks", "channels", "heads", "latents")
        if _get(config, f"model.{key}") is not None
    ]
    dataset = _get(config, "dataset.name")
    if _get(config, "dataset.embedded"):
        dataset = "embedded (made-up cars)"
    line = f"{mixer}: {', '.join(parts)}" + (f" · data set {dataset}" if dataset else "")
    return f"<header><h1>{_text(real(run_dir).name)}</h1><p>{_text(line)}</p></header>\n"


def _summary(run_dir: Path, history: History, metrics: Mapping[str, Any]) -> str:
    cells = "".join(
        f'<div class="figure"><b>{_text(value)}<small>{_text(unit)}</small></b>'
        f"<span>{_text(meaning)}</span></div>"
        for value, unit, meaning in headline_figures(run_dir, history, metrics)
    )
    return f'<section class="figures">{cells}</section>\n' if cells else ""


def _notices(notices: Sequence[str]) -> str:
    items = "".join(f"<li>{_text(notice)}</li>" for notice in notices)
    return f'<ul class="notices">{items}</ul>\n' if items else ""


def _learning(history: History) -> str:
    plots = [
        draw_curve(history, [("loss", "loss")], "Training loss", "loss"),
        draw_evaluations(history),
        draw_curve(history, [("lr", "lr")], "Learning rate", "learning rate", from_zero=True),
        draw_curve(history, [("grad_norm", "norm")], "Gradient norm", "norm before clipping"),
        draw_curve(
            history,
            [("tokens_per_s", "speed")],
            "Speed",
            "million cells/s",
            scale=1e-6,
            from_zero=True,
        ),
        draw_curve(
            history,
            [("step_s", "whole step"), ("data_s", "waiting for data"), ("comm_s", "collectives")],
            "Time of a step",
            "s",
            from_zero=True,
        ),
        draw_curve(
            history,
            [("peak_mem_bytes", "memory")],
            "Peak memory of a rank",
            "GiB",
            scale=2.0**-30,
            from_zero=True,
        ),
    ]
    drawn = "".join(f'<div class="plot">{plot}</div>' for plot in plots if plot)
    if not drawn:
        return ""
    return f'<section><h2>Learning</h2><div class="plots">{drawn}</div></section>\n'


def _evaluation(metrics: Mapping[str, Any]) -> str:
    if not metrics:
        return ""
    cases, units = metrics["cases"], metrics.get("units") or {}
    parts = []
    for field, mean in metrics["mean"].items():
        unit = str(units.get(field, "store units")).replace("m2/s2", "m²/s²")
        note = f"mae and rmse in {unit}; “area” weights each cell by its area"
        rows = [
            [case, *(number(value) for value in result[field].values())]
            for case, result in cases.items()
            if field in result
        ]
        foot = [["mean", *(number(value) for value in mean.values())]]
        head = ["case", *mean]
        known = metrics.get("rel_l2_dev") or {}
        if all(field in known.get(row[0], {}) for row in rows):
            dev = [known[row[0]][field] for row in rows]
            head.append("rel_l2_dev")
            for line, value in zip([*rows, *foot], [*dev, sum(dev) / len(dev)], strict=True):
                line.append(number(value))
            note += "; rel_l2_dev is relative to the deviation from the mean"
        parts.append(table(plain(field).capitalize(), note, head, rows, foot))
    names = list(dict.fromkeys(name for r in cases.values() for name in r.get("forces") or {}))
    if names:
        rows = []
        for case, result in cases.items():
            pairs = (result["forces"].get(name) for name in names)
            rows.append([case, *(f"{p['pred']:.4f} / {p['true']:.4f}" if p else "" for p in pairs)])
        scores = metrics.get("forces") or {}
        foot = [
            [title, *(number((scores.get(name) or {}).get(key)) for name in names)]
            for key, title in (("mae", "mean absolute error"), ("r2", "R²"))
            if scores
        ]
        note = "predicted / true, both integrated by the same code"
        parts.append(table("Force coefficients", note, ["case", *names], rows, foot, "wide"))
    plots = [draw_parity(cases, name) for name in _COEFFICIENTS]
    drawn = "".join(f'<div class="plot">{plot}</div>' for plot in plots if plot)
    lead = f"{len(cases)} case{'s' if len(cases) != 1 else ''}, all cells, in physical units."
    return (
        f'<section><h2>Evaluation</h2><p class="lead">{_text(lead)}</p>{"".join(parts)}'
        + (f'<div class="plots">{drawn}</div>' if drawn else "")
        + "</section>\n"
    )


def _pictures(predictions: Path, metrics: Mapping[str, Any], notices: list[str]) -> str:
    """Picture the best and the worst case (by pressure), or the first two where none is scored."""
    files = {path.stem: path for path in sorted(predictions.glob("*.vtp"))}
    if not files:
        return ""
    scored = {
        case: result["pressure"]["rel_l2"]
        for case, result in (metrics.get("cases") or {}).items()
        if case in files and "pressure" in result
    }
    ranked = sorted(scored, key=scored.__getitem__) or list(files)
    chosen = list(dict.fromkeys([ranked[0], ranked[-1]]))[:_MAX_PICTURED_CASES]
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        for case in chosen:
            drawn, problem = _render_in_a_process(files[case], Path(folder))
            if problem:
                notices.append(f"no pictures of {case}: {problem}")
            for field, (names, png) in drawn.items():
                title = f"{case}, {plain(field)}"
                error = (metrics.get("cases") or {}).get(case, {}).get(field, {}).get("rel_l2")
                rank = ""
                if len(scored) > 1 and case in (ranked[0], ranked[-1]):
                    rank = "the best case; " if case == ranked[0] else "the worst case; "
                more = f" · {rank}relative L2 {error:.4f}" if error is not None else ""
                data = base64.b64encode((Path(folder) / png).read_bytes()).decode("ascii")
                figures.append(
                    f'<figure><img alt="{_text(title)}: truth, prediction and error" '
                    f'src="data:image/png;base64,{data}"><figcaption><strong>{_text(title)}'
                    f"</strong>{_text(more)} · arrays {_text(', '.join(names))}</figcaption>"
                    "</figure>"
                )
    if not figures:
        return ""
    return f"<section><h2>Predicted surfaces</h2>{''.join(figures)}</section>\n"


def _render_in_a_process(vtp: Path, folder: Path) -> tuple[dict[str, Any], str | None]:
    """Draw a file's fields in a process of its own; return what was drawn, or why nothing was."""
    command = [sys.executable, "-m", "cpflare.report.plots", str(vtp), str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_RENDER_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {}, f"rendering took longer than {_RENDER_TIMEOUT_S:.0f} s"
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        said = [line for line in done.stderr.strip().splitlines() if line.strip()]
        reason = said[-1][:300] if said else f"the renderer ended with {done.returncode}"
        return {}, f"rendering is impossible here ({reason}); is there an OpenGL (Mesa) library?"
    drawn: dict[str, Any] = json.loads(lines[-1])
    if not drawn:
        return {}, f"{vtp.name} holds no prediction with its error; there was no truth"
    return drawn, None


def _configuration(config: Mapping[str, Any]) -> str:
    shown = (
        ("Store", "data.store"),
        ("Training cases", "data.train_split"),
        ("Cells a case and step", "data.tokens"),
        ("Inputs", "data.inputs"),
        ("Targets", "data.targets"),
        ("Loss", "train.loss"),
        ("Precision", "train.precision"),
        ("Steps", "train.steps"),
        ("Epochs", "train.epochs"),
        ("Cases a step", "train.cases_per_step"),
        ("Largest learning rate", "train.lr"),
        ("Weight decay", "train.weight_decay"),
        ("Seed", "train.seed"),
        ("Context-parallel ranks", "parallel.cp"),
        ("Data-parallel replicas", "parallel.dp"),
        ("Executor", "engine.executor"),
    )
    items = []
    for title, key in shown:
        value = _get(config, key)
        if value is None:
            continue
        if key == "train.epochs" and _get(config, "train.steps") is not None:
            continue  # steps win where both stand
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        if isinstance(value, int) and value >= 10_000:
            text = f"{value:,}"
        items.append(f"<div><dt>{_text(title)}</dt><dd>{_text(text)}</dd></div>")
    whole = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
    return (
        f"<section><h2>What was run</h2><dl>{''.join(items)}</dl>"
        f"<details><summary>The whole config.yaml</summary><pre>{_text(whole)}</pre></details>"
        "</section>\n"
    )
