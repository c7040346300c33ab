"""Errors of predicted fields against the truth, as float64 sums that add over chunks and ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cpflare.errors import DataError, NonFiniteError

Array = NDArray[Any]


class Chunk(NamedTuple):
    """Some cells of one field: vector norms of truth and error squared, and the cells' areas."""

    predicted: NDArray[np.float64]  # [n, d]
    true: NDArray[np.float64]  # [n, d]
    squared_error: NDArray[np.float64]  # [n]
    squared_truth: NDArray[np.float64]  # [n]
    error: NDArray[np.float64]  # [n]
    area: NDArray[np.float64]  # [n]


COLUMNS: dict[str, Callable[[Chunk], float]] = {
    "count": lambda c: len(c.area),
    "area": lambda c: c.area.sum(),
    "squared_error": lambda c: c.squared_error.sum(),
    "squared_truth": lambda c: c.squared_truth.sum(),
    "absolute_error": lambda c: c.error.sum(),
    "area_squared_error": lambda c: (c.area * c.squared_error).sum(),
    "area_squared_truth": lambda c: (c.area * c.squared_truth).sum(),
    "area_absolute_error": lambda c: (c.area * c.error).sum(),
    "truth_0": lambda c: c.true[:, 0].sum(),
    "truth_1": lambda c: c.true[:, 1:2].sum(),
    "truth_2": lambda c: c.true[:, 2:3].sum(),
    "nonfinite_predictions": lambda c: int((~np.isfinite(c.predicted).all(axis=1)).sum()),
    "nonfinite_truths": lambda c: int((~np.isfinite(c.true).all(axis=1)).sum()),
}
"""Columns of the table of sums: plain sums over cells, so that tables add over chunks and ranks."""

METRICS: dict[str, Callable[[Mapping[str, float]], float]] = {
    "rel_l2": lambda s: np.sqrt(s["squared_error"] / s["squared_truth"]),
    "rel_l2_area": lambda s: np.sqrt(s["area_squared_error"] / s["area_squared_truth"]),
    "mae": lambda s: s["absolute_error"] / s["count"],
    "rmse": lambda s: np.sqrt(s["squared_error"] / s["count"]),
    "mae_area": lambda s: s["area_absolute_error"] / s["area"],
    "rmse_area": lambda s: np.sqrt(s["area_squared_error"] / s["area"]),
}
"""What :meth:`FieldSums.metrics` returns for each field, in this order, from the sums of a case."""


def _rows(values: Array, what: str) -> NDArray[np.float64]:
    """Bring a scalar field [n] or a vector field [n, d] to float64 [n, d]."""
    rows = np.asarray(values, dtype=np.float64)
    if rows.ndim == 1:
        return rows[:, None]
    if rows.ndim != 2:
        raise DataError(f"{what} has shape {rows.shape}; metrics need [cells] or [cells, channels]")
    return rows


@dataclass
class FieldSums:
    """Error sums of one case over its fields: add chunks, merge ranks, and only then take roots.

    `sums` is float64 [fields, columns]; `to_vector` flattens it, so that a caller can sum it over
    ranks with one collective and put the result back with `from_vector`.  Bad values don't raise
    while chunks are added: they are counted, so that `metrics` fails on *every* rank alike.

    Example:
        sums = FieldSums(("pressure", "wall_shear"))
        for rows in chunks:
            sums.add(prediction(rows), truth(rows), area(rows))
        sums.metrics("run_1")["pressure"]["rel_l2"]
    """

    fields: tuple[str, ...]
    sums: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, len(COLUMNS))))

    def __post_init__(self) -> None:
        self.fields = tuple(self.fields)
        if self.sums.size == 0:
            self.sums = np.zeros((len(self.fields), len(COLUMNS)), dtype=np.float64)
        assert self.sums.shape == (len(self.fields), len(COLUMNS))

    def add(
        self,
        predictions: Mapping[str, Array],
        truth: Mapping[str, Array],
        area: Array,
    ) -> None:
        """Add one chunk of cells: fields [n] or [n, d] in physical units, `area` [n] in m².

        Raises:
            DataError: a field is absent or its shape differs between prediction, truth and area.
        """
        weight = np.asarray(area, dtype=np.float64)  # [n]
        for index, name in enumerate(self.fields):
            if name not in predictions or name not in truth:
                side = "prediction" if name not in predictions else "truth"
                raise DataError(f"the {side} has no field '{name}'; give one array for each field")
            predicted = _rows(predictions[name], f"predicted '{name}'")  # [n, d]
            true = _rows(truth[name], f"true '{name}'")  # [n, d]
            if predicted.shape != true.shape or len(true) != len(weight):
                raise DataError(
                    f"field '{name}': prediction {predicted.shape}, truth {true.shape} and area "
                    f"{weight.shape} differ in shape; all three need one row a cell"
                )
            # Overflow to infinity is not hidden: `metrics` reports the sum that is not finite.
            with np.errstate(over="ignore", invalid="ignore"):
                squared_error = np.square(predicted - true).sum(axis=1)  # [n]
                squared_truth = np.square(true).sum(axis=1)  # [n]
                error = np.sqrt(squared_error)
                chunk = Chunk(predicted, true, squared_error, squared_truth, error, weight)
                self.sums[index] += [column(chunk) for column in COLUMNS.values()]

    def merge(self, other: FieldSums) -> None:
        """Add the sums of another chunk or rank."""
        assert self.fields == other.fields, (self.fields, other.fields)
        self.sums += other.sums

    def to_vector(self) -> NDArray[np.float64]:
        """Return a flat float64 copy whose sum over ranks is the table of the whole case."""
        return self.sums.reshape(-1).copy()

    @classmethod
    def from_vector(cls, fields: Sequence[str], vector: Array) -> FieldSums:
        """Rebuild the table from the (summed) vector of `to_vector`."""
        names = tuple(fields)
        table = np.array(vector, dtype=np.float64).reshape(len(names), len(COLUMNS))
        return cls(names, table)

    def metrics(self, case: str) -> dict[str, dict[str, float]]:
        """Return `{field: {metric: value}}` with the names of METRICS, in the fields' own units.

        rel_l2 = √(Σ‖ŷ−y‖² / Σ‖y‖²) over cells and rel_l2_area the same with the cell's area as
        weight; mae and rmse are of the vector norm.  Source: FluidsBench's DrivAerML contract.

        Raises:
            NonFiniteError: a prediction of this case is NaN or infinite.
            DataError: the case has no cells, or a denominator is zero or not finite.
        """
        return {name: _finish(case, name, sums) for name, sums in self._by_field()}

    def relative_to_deviation(self) -> dict[str, float]:
        """Return `{field: √(Σ‖ŷ−y‖² / Σ‖y−ȳ‖²)}`, which a constant in the truth does not lessen."""
        return {name: _relative_to_deviation(sums) for name, sums in self._by_field()}

    def _by_field(self) -> Iterable[tuple[str, dict[str, float]]]:
        for name, row in zip(self.fields, self.sums, strict=True):
            yield name, dict(zip(COLUMNS, map(float, row), strict=True))


def _relative_to_deviation(sums: Mapping[str, float]) -> float:
    of_mean = sum(sums[f"truth_{k}"] ** 2 for k in range(3)) / sums["count"]
    # Not below what rounding leaves of a field that is the same everywhere.
    deviation = max(sums["squared_truth"] - of_mean, 1e-12 * sums["squared_truth"])
    return float(np.sqrt(sums["squared_error"] / deviation))


def _finish(case: str, name: str, sums: Mapping[str, float]) -> dict[str, float]:
    """Turn the sums of one case and field into metrics, or say which of them cannot be used."""
    where = f"case '{case}', field '{name}'"
    count = sums["count"]
    if count == 0:
        raise DataError(f"{where}: no cells were evaluated; the case needs at least one")
    if sums["nonfinite_predictions"]:
        raise NonFiniteError(
            f"{where}: {sums['nonfinite_predictions']:.0f} of {count:.0f} predictions are NaN or "
            "infinite; predict again from a finite checkpoint"
        )
    if sums["nonfinite_truths"]:
        raise DataError(
            f"{where}: {sums['nonfinite_truths']:.0f} of {count:.0f} true values are NaN or "
            "infinite; check the store with `cpflare inspect STORE --verify`"
        )
    for column, meaning in (
        ("squared_truth", "the squared norm of the truth"),
        ("area_squared_truth", "the area-weighted squared norm of the truth"),
        ("area", "the total area"),
    ):
        if not np.isfinite(sums[column]) or sums[column] <= 0:
            raise DataError(
                f"{where}: {meaning} is {sums[column]!r}, and a relative error needs a positive, "
                "finite one; check the case's field and areas"
            )
    values = {name: float(metric(sums)) for name, metric in METRICS.items()}
    for name, value in values.items():
        if not np.isfinite(value):
            raise NonFiniteError(
                f"{where}: {name} overflows float64 ({value}); the predictions are too large to be "
                "meant"
            )
    return values


def evaluate_case(
    case: str,
    predictions: Mapping[str, Array],
    truth: Mapping[str, Array],
    area: Array,
    *,
    fields: Sequence[str] | None = None,
    chunk_rows: int = 1 << 20,
) -> dict[str, dict[str, float]]:
    """Return the metrics of one case held in memory; rows of all arrays must correspond.

    `fields` defaults to those that are predicted.  Raises as `FieldSums.metrics` does.
    """
    sums = FieldSums(tuple(predictions) if fields is None else tuple(fields))
    for name in sums.fields:
        lengths = [len(values[name]) if name in values else None for values in (predictions, truth)]
        if lengths != [len(area)] * 2:
            raise DataError(
                f"case '{case}', field '{name}': {lengths[0]} predictions, {lengths[1]} true "
                f"values and {len(area)} areas; all three need one row a cell"
            )
    # An empty case goes through `add` once, so that it fails in `metrics` with its name.
    for start in range(0, max(len(area), 1), chunk_rows):
        rows = slice(start, start + chunk_rows)
        sums.add(
            {name: predictions[name][rows] for name in sums.fields},
            {name: truth[name][rows] for name in sums.fields},
            area[rows],
        )
    return sums.metrics(case)


def mean_over_cases(
    cases: Iterable[Mapping[str, Mapping[str, float]]],
) -> dict[str, dict[str, float]]:
    """Return the plain mean over cases of each field's metrics; every case needs every field."""
    table = list(cases)
    assert table, "a mean over cases needs at least one case"
    return {
        name: {
            metric: float(np.mean([case[name][metric] for case in table], dtype=np.float64))
            for metric in metrics
        }
        for name, metrics in table[0].items()
    }


def r2_score(predicted: Sequence[float], true: Sequence[float], least: float = 0.0) -> float | None:
    """Return R² = 1 − Σ(ŷ−y)² / Σ(y−ȳ)², or None where the truth deviates by at most `least`."""
    y_hat, y = np.asarray(predicted, dtype=np.float64), np.asarray(true, dtype=np.float64)
    total = float(np.square(y - y.mean()).sum())
    return None if total <= len(y) * least**2 else 1.0 - float(np.square(y_hat - y).sum()) / total
