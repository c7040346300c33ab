"""Scores written predictions against a store: metrics and forces of every case, metrics.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpflare.data.store import Case, Store
from cpflare.errors import DataError
from cpflare.evaluate.export import read_description, read_predictions
from cpflare.evaluate.find import prediction_files
from cpflare.evaluate.forces import ForceSums, Reference, coefficients
from cpflare.evaluate.metrics import FieldSums, mean_over_cases, r2_score
from cpflare.evaluate.sanity import half_of
from cpflare.fields import FIELDS
from cpflare.files import written_aside

Array = NDArray[Any]

# Rows held at a time: about a shard, so that a shard is decoded once.
_CHUNK_ROWS = 1 << 20
_DOMINATED = 5.0  # norm of a field over that of its deviation from its mean
_HARDLY = 2e-3  # deviation of a coefficient over the size of the largest one


def evaluate_predictions(
    out: Path, store: Store, *, cases: Sequence[str] | None = None
) -> dict[str, Any]:
    """Compare the predictions under `out` with the store's truth and write `out/metrics.json`.

    `cases` defaults to every predicted case that the store knows.  Returns what is written:
    `{"cases": {case: {field: {metric: value}, "forces": {"Cd": {"pred", "true"}, …}}}, "mean":
    {field: {metric: value}}, "forces": {"Cd": {"mae", "r2"}, …}, "units": …, "notices": […]}`,
    with fields in physical units (the store's) and "forces" at the top from two cases on.

    Raises:
        DataError: no predictions, a case without truth, rows that are not those of the store, or a
            denominator of zero.
        NonFiniteError: a prediction is NaN or infinite.
    """
    out = Path(out)
    notices: list[str] = []
    files = prediction_files(out, cases)
    unknown = [case for case in files if case not in store.cases]
    if cases is None and unknown:
        files = {case: path for case, path in files.items() if case in store.cases}
        if not files:
            raise DataError(
                f"none of the predictions in {out} ({', '.join(unknown)}) is a case of the store, "
                f"which has {', '.join(store.cases)}; give the store they were made from"
            )
        notices.append(f"not in the store, so not evaluated: {', '.join(unknown)}")
    results: dict[str, dict[str, Any]] = {}
    units: dict[str, str] = {}
    deviations: dict[str, dict[str, float]] = {}
    for case, path in files.items():
        opened = store.case(case)
        predictions = read_predictions(path, store.field_map)
        results[case] = evaluate_stored_case(case, predictions, opened, notices, deviations)
        units |= opened.attrs.get("units") or {}
    told = {case: (read_description(files[case]) or {}).get("trained_on") for case in results}
    notices += seen_in_training(told, store)
    notices += _dominated_by_mean(results, deviations)
    if store.embedded:
        notices.append("the embedded data set: made-up cars with a made-up flow")
    metrics = {
        "cases": results,
        "mean": _mean(results),
        "rel_l2_dev": deviations,
        "forces": _force_scores(results, notices),
        "units": units,
        "notices": notices,
    }
    with written_aside(out / "metrics.json") as aside:
        aside.write_text(json.dumps(metrics, indent=2, allow_nan=False) + "\n")
    return metrics


def seen_in_training(told: Mapping[str, bool | None], store: Store) -> list[str]:
    """Notices on cases that a run was trained on, or perhaps was.

    `told` is what the run says of each case; only where it does not know (None), the store's
    present split stands in.
    """
    seen = [case for case, known in told.items() if known]
    train = store.splits.get("train", ())
    perhaps = [case for case, known in told.items() if known is None and case in train]
    notices = [f"seen in training: {', '.join(seen)}"] if seen else []
    if perhaps:
        notices.append(f"in the store's split 'train', so perhaps seen: {', '.join(perhaps)}")
    return notices


def _dominated_by_mean(
    results: Mapping[str, Mapping[str, Any]], deviations: Mapping[str, Mapping[str, float]]
) -> list[str]:
    """Where a large constant, as in absolute pressures, makes relative errors look small."""
    cases: dict[str, list[str]] = {}
    for case, fields in deviations.items():
        for name, value in fields.items():
            if value > _DOMINATED * results[case][name]["rel_l2"]:
                cases.setdefault(name, []).append(case)
    return [
        f"{name}: its mean is far larger than its deviation from it ({', '.join(listed[:3])}"
        f"{', …' if len(listed) > 3 else ''}), as in absolute pressures: rel_l2 looks small "
        f"whatever is predicted; relative to the deviation the error is "
        f"{np.mean([deviations[case][name] for case in listed]):.4g} (rel_l2_dev)"
        for name, listed in cases.items()
    ]


def evaluate_stored_case(
    case: str,
    predictions: Mapping[str, Array],
    stored: Case,
    notices: list[str],
    deviations: dict[str, dict[str, float]],
) -> dict[str, Any]:
    """Return one case's metrics and forces; `predictions` are in source order, store units.

    Adds to `notices`, and to `deviations` the errors relative to the truth's deviation.

    The store's rows are shuffled: row i is source row `cell_id[i]`, which is where its prediction
    is looked up, a shard of rows at a time.
    """
    names = _fields_to_score(case, predictions, stored)
    reference, shear_sign = _force_setup(case, names, stored, notices)
    sums = FieldSums(names)
    forces = [ForceSums(reference.centre, shear_sign) for _ in range(2)] if reference else []
    wanted = ["cell_id", "area", *(["position", "area_vector"] if forces else []), *names]
    counted = np.zeros(stored.num_rows, dtype=bool)
    open_by = np.zeros(3)  # Σ A, which vanishes for a closed surface
    for start in range(0, max(stored.num_rows, 1), _CHUNK_ROWS):
        truth = stored.read(slice(start, min(start + _CHUNK_ROWS, stored.num_rows)), wanted)
        rows = truth["cell_id"]
        if len(rows) and (rows.min() < 0 or rows.max() >= stored.num_rows or counted[rows].any()):
            raise DataError(
                f"case '{case}': cell_id of the store is no permutation of its {stored.num_rows} "
                "rows; run `cpflare inspect STORE --verify`"
            )
        counted[rows] = True
        predicted = {name: predictions[name][rows] for name in names}
        sums.add(predicted, truth, truth["area"])
        open_by += truth["area_vector"].sum(axis=0) if forces else 0.0
        for total, fields in zip(forces, (predicted, truth), strict=False):
            total.add(
                truth["position"],
                truth["area_vector"],
                truth["area"],
                fields["pressure"],
                fields.get("wall_shear"),
            )
    result: dict[str, Any] = dict(sums.metrics(case))
    deviations[case] = sums.relative_to_deviation()
    result["forces"] = {}
    if reference is not None:
        notices += _cut(stored, open_by) if reference.mirror is None else []
        pred, true = (coefficients(total, reference) for total in forces)
        suffix = "" if shear_sign else "_pressure"  # only part of the force: the name says so
        result["forces"] = {
            name + suffix: {"pred": pred[name], "true": true[name]} for name in pred
        }
    return result


def _fields_to_score(case: str, predictions: Mapping[str, Array], stored: Case) -> tuple[str, ...]:
    """The predicted fields that the store has the truth of, each with the store's rows."""
    names = tuple(name for name in predictions if name in stored.fields)
    if not names:
        raise DataError(
            f"case '{case}': the store has no truth for {', '.join(predictions)}; prepare it from "
            "sources with fields"
        )
    for name in names:
        shape = FIELDS[name].shape(stored.num_rows)
        if predictions[name].shape != shape:
            raise DataError(
                f"case '{case}', field '{name}': the prediction has shape "
                f"{predictions[name].shape}, and the store's case needs {shape}; predict from the "
                "mesh that the store was made from"
            )
    return names


def _cut(stored: Case, open_by: Array) -> list[str]:
    """Say where a surface ends in a plane, whose forces are those of a half."""
    bounds = stored.attrs.get("bounds")
    if bounds is None or stored.attrs.get("closed") is not False:
        return []
    half = half_of(open_by, *np.array(bounds, np.float64).T)
    return [f"{stored.name}: {half}"] if half else []


def _force_setup(
    case: str, names: Sequence[str], stored: Case, notices: list[str]
) -> tuple[Reference | None, int]:
    """Say which forces this case allows; what is left out is noted, never guessed."""
    attrs = stored.attrs
    constants = attrs.get("reference") or {}
    missing = [key for key in ("speed", "rho", "area") if constants.get(key) is None]
    if "pressure" not in names:
        notices.append(f"{case}: no forces, because pressure is not predicted")
        return None, 0
    if missing:
        notices.append(f"{case}: no forces, because the store knows no {', '.join(missing)}")
        return None, 0
    reference = Reference.from_mapping(case, constants)
    shear_sign = attrs.get("shear_sign")
    if "wall_shear" not in names:
        notices.append(f"{case}: forces from pressure alone, because wall_shear is not predicted")
        return reference, 0
    if shear_sign not in (-1, 1):
        notices.append(f"{case}: forces from pressure alone, because the shear's sign is unknown")
        return reference, 0
    return reference, int(shear_sign)


def _mean(results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    fields = [
        {name: values for name, values in result.items() if name != "forces"}
        for result in results.values()
    ]
    if len({tuple(sorted(entry)) for entry in fields}) > 1:
        held = {case: sorted(set(result) - {"forces"}) for case, result in results.items()}
        raise DataError(f"the cases predict different fields ({held}); predict them alike")
    return mean_over_cases(fields)


def _force_scores(
    results: Mapping[str, Mapping[str, Any]], notices: list[str]
) -> dict[str, dict[str, float | None]]:
    """Mean absolute error and R² of each coefficient over the cases that have it."""
    scores: dict[str, dict[str, float | None]] = {}
    names = dict.fromkeys(name for result in results.values() for name in result["forces"])
    true_values = [p["true"] for result in results.values() for p in result["forces"].values()]
    size = max(map(abs, true_values), default=0.0)
    for name in names:
        pairs = [result["forces"][name] for result in results.values() if name in result["forces"]]
        if len(pairs) < 2:
            continue
        pred, true = ([pair[side] for pair in pairs] for side in ("pred", "true"))
        error = np.abs(np.subtract(pred, true, dtype=np.float64))
        r2 = r2_score(pred, true, _HARDLY * size)
        scores[name] = {"mae": float(error.mean()), "r2": r2}
        if r2 is None and np.ptp(true) == 0:
            notices.append(f"R² of {name} is undefined: its true value is the same in all cases")
        elif r2 is None:
            notices.append(
                f"R² of {name} is left out: its true value hardly varies over the cases "
                f"(deviation {np.std(true):.2g})"
            )
    return scores


def format_metrics(metrics: Mapping[str, Any]) -> str:
    """Return the metrics as text tables for a terminal; `print` it."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=110, force_terminal=False)
    units = metrics.get("units") or {}
    tables = []
    for field in metrics["mean"]:
        unit = units.get(field, "store units")
        table = Table(title=f"{field} (mae and rmse in {unit}), over all cells")
        table.add_column("case")
        dev = [fields[field] for fields in (metrics.get("rel_l2_dev") or {}).values()]
        for metric in [*metrics["mean"][field], *(["rel_l2_dev"] if dev else [])]:
            table.add_column(metric, justify="right")
        for (case, result), more in zip_longest(metrics["cases"].items(), dev):
            values = [*result[field].values(), *([] if more is None else [more])]
            table.add_row(escape(case), *(f"{value:#.4g}" for value in values))
        table.add_section()
        means = [*metrics["mean"][field].values(), *([float(np.mean(dev))] if dev else [])]
        table.add_row("mean", *(f"{value:#.4g}" for value in means))
        tables.append(table)
    names = dict.fromkeys(name for r in metrics["cases"].values() for name in r["forces"])
    if names:
        table = Table(title="force coefficients, predicted / true")
        table.add_column("case")
        for name in names:
            table.add_column(name, justify="right")
        for case, result in metrics["cases"].items():
            pairs = (result["forces"].get(name) for name in names)
            table.add_row(
                escape(case), *(f"{p['pred']:.4f} / {p['true']:.4f}" if p else "" for p in pairs)
            )
        scores = metrics.get("forces") or {}
        if scores:
            table.add_section()
            for key, title in (("mae", "mean abs. error"), ("r2", "R²")):
                found = ((scores.get(name) or {}).get(key) for name in names)
                table.add_row(title, *("–" if v is None else f"{v:.4f}" for v in found))
        tables.append(table)
    with console.capture() as captured:
        for table in tables:
            console.print(table)
        for notice in metrics.get("notices") or ():
            console.print(f"note: {notice}", markup=False, highlight=False, soft_wrap=True)
    return captured.get().rstrip()
