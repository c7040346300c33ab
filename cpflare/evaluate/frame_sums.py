"""Errors by frame and channel as float64 sums that add over chunks and ranks; and horizons."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cpflare.errors import ConfigError, DataError

Array = NDArray[Any]
Numbers = NDArray[np.float64]

VRMSE_EPS: Final = 1e-7
"""Added to a variance, in squared units of the field. Source: The Well."""
LOW_VARIANCE: Final = 1e-6
"""Below it the eps speaks in a vRMSE; frames and channels of that kind are counted."""


class _Rows(NamedTuple):
    """Rows of frames: e = ŷ − y, y and a = y − m [T, n, C], w [n, 1]."""

    error: Numbers
    truth: Numbers
    away: Numbers
    weight: Numbers


_COLUMNS: Final[dict[str, Callable[[_Rows], Numbers]]] = {
    "count": lambda r: np.full_like(r.error, 1.0).sum(axis=1),
    "weight": lambda r: np.broadcast_to(r.weight, r.error.shape).sum(axis=1),
    "error2": lambda r: (r.error**2).sum(axis=1),
    "w_error2": lambda r: (r.weight * r.error**2).sum(axis=1),
    "truth2": lambda r: (r.truth**2).sum(axis=1),
    "w_truth2": lambda r: (r.weight * r.truth**2).sum(axis=1),
    "w_away": lambda r: (r.weight * r.away).sum(axis=1),
    "w_away2": lambda r: (r.weight * r.away**2).sum(axis=1),
    "absolute": lambda r: np.abs(r.error).sum(axis=1),
}
_COLUMN: Final = {name: number for number, name in enumerate(_COLUMNS)}


@dataclass
class FrameSums:
    """Sums of one field of a case or window: [frames, channels, columns], before any root.

    `mean` [C] is the field's over the training set: variances are summed about it, since a
    difference of squares about 0 would cancel. Add chunks of rows, merge ranks, then ask. A
    prediction that is not finite makes its frames' errors infinite; none is left out of a mean.

    Example:
        sums = FrameSums.empty("velocity", frames=60, mean=mean)
        for rows in chunks:
            sums.add(prediction[:, rows], truth[:, rows], weight[rows])
        sums.vrmse(horizon("21-60"))
    """

    name: str
    mean: Numbers
    sums: Numbers = field(repr=False)

    @classmethod
    def empty(cls, name: str, *, frames: int, mean: Array) -> FrameSums:
        """Sums of nothing yet, for a field of `len(mean)` channels."""
        centre = np.atleast_1d(np.asarray(mean, np.float64))
        return cls(name, centre, np.zeros((frames, len(centre), len(_COLUMNS))))

    def add(self, predicted: Array, truth: Array, weight: Array, first: int = 0) -> None:
        """Add rows of some frames, [t, n, C] in physical units, that start at frame `first`.

        `weight` [n] is of a row in the domain; of a uniform grid it is 1.

        Raises: DataError where the shapes do not belong to each other or to the field.
        """
        y, t = np.asarray(predicted, np.float64), np.asarray(truth, np.float64)
        w = np.asarray(weight, np.float64)
        frames, channels, _ = self.sums.shape
        fits = y.shape == t.shape and y.ndim == 3 and y.shape[1:] == (len(w), channels)
        if not fits or first + len(y) > frames:
            raise DataError(
                f"field '{self.name}': prediction {y.shape}, truth {t.shape} and weights "
                f"{w.shape} at frame {first} do not fit {frames} frames of {channels} channels"
            )
        with np.errstate(over="ignore", invalid="ignore"):
            error = y - t
            # What is not a number is as wrong as can be; truth that is none is the data's fault.
            error[np.isnan(y)] = np.inf
            rows = _Rows(error, t, t - self.mean, w[:, None])
            new = np.stack([column(rows) for column in _COLUMNS.values()], axis=-1)
        self.sums[first : first + len(y)] += new

    def merge(self, other: FrameSums) -> None:
        """Add the sums of another chunk or rank."""
        assert (self.name, self.sums.shape) == (other.name, other.sums.shape)
        self.sums += other.sums

    def to_vector(self) -> Numbers:
        """A flat copy, whose sum over ranks is the whole case's."""
        return self.sums.reshape(-1).copy()

    def from_vector(self, vector: Array) -> FrameSums:
        """The sums that the (summed) vector of `to_vector` holds."""
        return FrameSums(self.name, self.mean, np.array(vector).reshape(self.sums.shape))

    def rel_l2(self, frames: slice = slice(None), *, weighted: bool = False) -> float:
        """√(Σ e² / Σ y²) over rows, channels and `frames` jointly; with weights in both sums.

        Raises: DataError where the truth is zero in all of them, or not finite.
        """
        prefix = "w_" if weighted else ""
        return float(self._relative(self._of(f"{prefix}error2", frames).sum(), prefix, frames))

    def rel_l2_mean(self, frames: slice = slice(None)) -> float:
        """The mean over `frames` of each one's `rel_l2`.

        Raises: DataError where the truth of one of them is zero.
        """
        numbers = range(len(self.sums))[frames]
        return float(np.mean([self.rel_l2(slice(k, k + 1)) for k in numbers]))

    def rel_l2_channels(self, frames: slice = slice(None)) -> Numbers:
        """`rel_l2` of each channel by itself [C]."""
        error = self._of("error2", frames).sum(axis=0)
        truth = self._of("truth2", frames).sum(axis=0)
        for channel, value in enumerate(truth):
            self._need(value, f"channel {channel}", frames)
        return np.asarray(np.sqrt(error / truth))

    def rmse(self, frames: slice = slice(None)) -> float:
        """√ of the mean over rows and `frames` of the error's squared norm; in the field's unit."""
        count = self._of("count", frames)[:, 0].sum()
        return float(np.sqrt(self._of("error2", frames).sum() / count))

    def mae(self, frames: slice = slice(None)) -> float:
        """The mean over rows, channels and `frames` of |e|; in the field's unit."""
        return float(self._of("absolute", frames).sum() / self._of("count", frames).sum())

    def vrmse_frames(self) -> Numbers:
        """√(<e²> / (var y + 1e-7)) [T, C], <> the weighted mean over a frame's rows.

        The variance is the biased one. Source: PAdaNorm; The Well, but for the unbiased variance.
        """
        weight = self._of("weight", slice(None))
        with np.errstate(invalid="ignore"):
            error = self._of("w_error2", slice(None)) / weight
        return np.asarray(np.sqrt(error / (self.variance() + VRMSE_EPS)))

    def vrmse(self, frames: slice = slice(None)) -> float:
        """The mean over `frames` of the mean over channels of `vrmse_frames`."""
        return float(self.vrmse_frames()[frames].mean(axis=1).mean())

    def variance(self) -> Numbers:
        """The weighted biased variance of the truth over a frame's rows [T, C]."""
        weight = self._of("weight", slice(None))
        if (weight <= 0).any():
            raise DataError(f"field '{self.name}': no rows were evaluated; it needs at least one")
        away = self._of("w_away", slice(None)) / weight
        square = self._of("w_away2", slice(None)) / weight
        return np.asarray(np.maximum(square - away**2, 0.0))

    def low_variances(self, frames: slice = slice(None)) -> int:
        """Frames times channels whose variance is below 1e-6, so that the eps decides vRMSE."""
        return int((self.variance()[frames] < LOW_VARIANCE).sum())

    def diverged_at(self) -> int | None:
        """The first frame, counted from 1, with a prediction that is not finite; None: none."""
        bad = ~np.isfinite(self._of("error2", slice(None))).all(axis=1)
        return int(np.argmax(bad)) + 1 if bad.any() else None

    def _of(self, column: str, frames: slice) -> Numbers:
        return self.sums[frames, :, _COLUMN[column]]

    def _relative(self, error: float, prefix: str, frames: slice) -> Any:
        truth = self._of(f"{prefix}truth2", frames).sum()
        self._need(truth, "the field", frames)
        return np.sqrt(error / truth)

    def _need(self, truth: float, what: str, frames: slice) -> None:
        if not np.isfinite(truth) or truth <= 0:
            numbers = range(len(self.sums))[frames]
            where = f"frames {numbers.start + 1} to {numbers.stop}" if numbers else "no frame"
            raise DataError(
                f"field '{self.name}': the squared norm of the truth of {what} in {where} is "
                f"{float(truth)!r}, and a relative error needs a positive one; use vrmse, or leave "
                "those frames out by data.frames"
            )


def horizon(text: str) -> slice:
    """The frames of a horizon such as `20` or `21-60`, counted from 1, both ends among them.

    Raises: ConfigError for another text.
    """
    found = re.fullmatch(r"\s*([1-9]\d*)\s*(?:-\s*([1-9]\d*)\s*)?", text)
    first, last = (int(n or found[1]) for n in found.groups()) if found else (1, 0)
    if last < first:
        raise ConfigError(
            f"horizon={text!r} is no frame or range of frames; give such as 1 or 21-60"
        )
    return slice(first - 1, last)


def horizons(text: str, frames: int) -> dict[str, slice]:
    """The horizons of a list such as `1,1-20,21-60`, by their texts.

    Raises: ConfigError for another text, or a horizon that ends beyond `frames`.
    """
    found = {part.strip(): horizon(part) for part in text.split(",")}
    for name, part in found.items():
        if part.stop > frames:
            raise ConfigError(
                f"eval.horizons: {name} ends beyond the rollout of {frames} frames; set "
                f"eval.rollout={part.stop}"
            )
    return found


def mean_over_windows(values: Sequence[Numbers]) -> Numbers:
    """The mean over windows or cases of equal arrays; one that diverged makes it infinite."""
    assert values, "a mean over windows needs at least one"
    with np.errstate(invalid="ignore"):
        return np.asarray(np.mean(np.stack(list(values)), axis=0))
