"""Mean, deviation and range of fields, gathered chunk by chunk in float64 (Chan's merge)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpflare.errors import DataError

Float64 = NDArray[np.float64]

# A channel whose deviation is below this share of its largest value is constant in float32.
CONSTANT = 1e-6
_ROWS = 65_536  # rows taken at a time: the float64 copies stay within the processor's cache


@dataclass(frozen=True)
class Moments:
    """Count, mean, sum of squared deviations and range of one field; merging is exact.

    All arrays are float64 [channels].
    """

    count: int
    mean: Float64
    m2: Float64
    min: Float64
    max: Float64

    @classmethod
    def of(cls, values: NDArray[Any]) -> Moments:
        """Moments of `values` [rows] or [rows, channels]."""
        table = values.reshape(len(values), -1)
        whole: Moments | None = None
        for start in range(0, len(table), _ROWS):
            # [channels, rows]: numpy reduces long rows faster than long columns
            block = np.array(table[start : start + _ROWS].T, np.float64, order="C")  # a copy
            mean = block.mean(axis=1)
            low, high = block.min(axis=1), block.max(axis=1)
            block -= mean[:, None]
            part = cls(block.shape[1], mean, np.einsum("cr,cr->c", block, block), low, high)
            whole = part if whole is None else whole.merge(part)
        if whole is None:
            raise DataError("statistics of a field without rows; give at least one row")
        return whole

    def merge(self, other: Moments) -> Moments:
        """Moments of both sets together (Chan, Golub and LeVeque)."""
        count = self.count + other.count
        delta = other.mean - self.mean
        mean = self.mean + delta * (other.count / count)
        m2 = self.m2 + other.m2 + delta**2 * (self.count * other.count / count)
        low, high = np.minimum(self.min, other.min), np.maximum(self.max, other.max)
        return Moments(count, mean, m2, low, high)

    def shifted(self, offset: Float64) -> Moments:
        """Moments of the same values plus `offset` [channels]."""
        return Moments(
            self.count, self.mean + offset, self.m2, self.min + offset, self.max + offset
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON; floats keep all their digits."""
        arrays = {key: getattr(self, key).tolist() for key in ("mean", "m2", "min", "max")}
        return {"count": self.count, **arrays}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Moments:
        """The inverse of `to_dict`."""
        arrays = {key: np.array(data[key], np.float64) for key in ("mean", "m2", "min", "max")}
        return cls(int(data["count"]), **arrays)


@dataclass(frozen=True)
class FieldStatistics:
    """Statistics of one field in the store's units: float64 [channels], and the number of rows.

    `std` is the population's deviation. A channel that is constant to single precision gets its
    largest magnitude as a floor (1 where that is 0), so that dividing by it is always safe.
    """

    mean: Float64
    std: Float64
    min: Float64
    max: Float64
    count: int

    @classmethod
    def from_moments(cls, moments: Moments) -> FieldStatistics:
        """Deviation with the floor for constant channels."""
        std = np.sqrt(moments.m2 / moments.count)
        scale = np.maximum(np.abs(moments.min), np.abs(moments.max))
        floor = np.where(scale > 0, scale, 1.0)
        std = np.where(std <= CONSTANT * scale, floor, std)
        return cls(moments.mean, std, moments.min, moments.max, moments.count)


@dataclass(frozen=True)
class Statistics:
    """Statistics of every field over the training split.

    Keys: position (absolute), position_relative (minus each case's offset), normal, and each
    target that the store holds (pressure, wall_shear).
    """

    fields: dict[str, FieldStatistics]

    @classmethod
    def merge(cls, cases: Iterable[Mapping[str, Moments]]) -> Statistics:
        """Merge the moments of the training cases, in the order given."""
        whole: dict[str, Moments] = {}
        for case in cases:
            for name, part in case.items():
                whole[name] = whole[name].merge(part) if name in whole else part
        return cls({name: FieldStatistics.from_moments(m) for name, m in whole.items()})

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON; floats keep all their digits."""
        return {
            name: {
                "mean": f.mean.tolist(),
                "std": f.std.tolist(),
                "min": f.min.tolist(),
                "max": f.max.tolist(),
                "count": f.count,
            }
            for name, f in self.fields.items()
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Statistics:
        """The inverse of `to_dict`."""

        def array(values: Any) -> Float64:
            return np.array(values, np.float64)

        return cls(
            {
                name: FieldStatistics(
                    array(f["mean"]),
                    array(f["std"]),
                    array(f["min"]),
                    array(f["max"]),
                    int(f["count"]),
                )
                for name, f in data.items()
            }
        )

    @property
    def hash(self) -> str:
        """SHA-256 over all numbers; checkpoints carry it."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def case_moments(moments: Mapping[str, Any], offset: Float64) -> dict[str, Moments]:
    """The moments that a case's attributes hold, with the absolute position added."""
    parts = {name: Moments.from_dict(m) for name, m in moments.items()}
    if "position_relative" in parts:
        parts = {"position": parts["position_relative"].shifted(offset), **parts}
    return parts
