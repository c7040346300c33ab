"""What is odd about a surface beside those of the training: size, place, axes, cells, a cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpflare.data.normalize import Normalizer

Float64 = NDArray[np.float64]

_UNITS = {1000.0: "millimetres", 100.0: "centimetres", 39.37: "inches", 25.4: "", 3.281: "feet"}
_NEAR = 1.15  # a factor this close to one between units is taken for it
_FAR = 0.5  # of the training's extent: a surface whose middle is further outside is elsewhere
_TURNED = 0.5  # natural logarithm of extents: how much better other axes must fit
_ROWS = 4.0  # times as many cells, or as few
_STRAIGHT, _LARGE = 0.99, 0.3  # of a cut: how well along an axis, what share of the box


@dataclass(frozen=True)
class Trained:
    """The surfaces that a run was trained on: their common box, extents and numbers of rows."""

    low: Float64  # [3], absolute
    high: Float64
    extent: Float64  # [3], about the largest of a case
    rows: tuple[int, int] | None
    relative: bool  # whether a surface's place does not matter

    @classmethod
    def of(cls, dataset: Mapping[str, Any], normalizer: Normalizer) -> Trained:
        """From a run's `dataset` section."""
        (low, high), (smallest, largest) = (
            [np.array(dataset["statistics"][name][end], np.float64) for end in ("min", "max")]
            for name in ("position", "position_relative")
        )
        rows = dataset.get("train_rows")
        known = (int(rows[0]), int(rows[1])) if rows else None
        return cls(low, high, largest - smallest, known, normalizer.relative_position)

    def remarks(self, low: Float64, high: Float64, rows: int) -> list[str]:
        """Notices on a surface, given by its box (metres, canonical axes) and its rows."""
        extent, usual = high - low, float(self.extent.max())
        scaled = _unit(float(extent.max()) / usual)
        found = [] if scaled is None else [scaled]
        middle = (low + high) / 2
        beyond = np.maximum(self.low - middle, middle - self.high)
        axis = int(np.argmax(beyond))
        if scaled is None and not self.relative and beyond[axis] > _FAR * usual:
            found.append(
                f"its {'xyz'[axis]} is {low[axis]:.4g} to {high[axis]:.4g} m, that of the training "
                f"{self.low[axis]:.4g} to {self.high[axis]:.4g} m; move it there, or train with "
                "data.position=relative"
            )
        found += _turned(extent, self.extent)
        if self.rows is not None and not self.rows[0] / _ROWS <= rows <= self.rows[1] * _ROWS:
            kind = "coarser" if rows < self.rows[0] else "finer"
            found.append(
                f"with {rows:,} rows it is far {kind} than those of the training "
                f"({self.rows[0]:,} to {self.rows[1]:,}); errors may be larger: mesh it alike"
            )
        return found


def _unit(ratio: float) -> str | None:
    for factor, unit in _UNITS.items():
        for times, scale in ((factor, 1 / factor), (1 / factor, factor)):
            if 1 / _NEAR < ratio / times < _NEAR:
                kind = f" (in {unit}?)" if unit and times > 1 else ""
                return (
                    f"it is about {times:.4g} times as large as the training's surfaces{kind}; "
                    f"give --length-scale {scale:.4g} (length_scale in a field map) if its unit is "
                    "another"
                )
    return None


def _turned(extent: Float64, usual: Float64) -> list[str]:
    """Whether the extents fit better with the axes in another order, whatever the size."""
    if min(extent.min(), usual.min()) <= 0:
        return []
    wanted = np.log(usual / usual.max())

    def misfit(axes: tuple[int, ...]) -> float:
        return float(np.abs(np.log(extent[list(axes)] / extent.max()) - wanted).sum())

    best = min(permutations(range(3)), key=misfit)
    if misfit((0, 1, 2)) - misfit(best) < _TURNED or misfit(best) > _TURNED:
        return []
    own, theirs = (" × ".join(f"{value:.3g}" for value in each) for each in (extent, usual))
    return [
        f"its extents are {own} m along x, y and z, those of the training {theirs} m: axes may "
        "have been exchanged; turn it (x downstream, z up)"
    ]


def half_of(area_vector: Float64, low: Float64, high: Float64) -> str | None:
    """A remark on a surface that ends in a plane, as half models do.

    `area_vector` [3] is the sum over the surface: minus the area of what would close it.
    """
    extent = np.maximum(high - low, 0.0)
    size = float(np.linalg.norm(area_vector))
    axis = int(np.argmax(np.abs(area_vector)))
    face = float(np.prod(np.delete(extent, axis)))
    if not size or abs(area_vector[axis]) < _STRAIGHT * size or size < _LARGE * face:
        return None
    place = (low if area_vector[axis] > 0 else high)[axis]
    return (
        f"it is open in a plane at {'xyz'[axis]} = {place:.4g} m, as a half model is: forces are "
        f"those of this half alone, and the force along {'xyz'[axis]} is the cut's; for those of "
        f"the whole give --mirror {'xyz'[axis]} (reference.mirror in a field map), or mirror it"
    )
