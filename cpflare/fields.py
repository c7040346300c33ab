"""What a field is, declared once: kind, channels, unit, and how a source's arrays become it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cpflare.errors import DataError

Array = NDArray[Any]


@dataclass(frozen=True)
class Field:
    """A canonical field: a value of every row. A vector has a channel an axis, and turns with them.

    `role` is what it serves for by default: a model's input or target, or a row's weight.
    """

    name: str
    kind: Literal["scalar", "vector"]
    role: Literal["input", "target", "weight"]
    unit: str | None = None  # None: as the field map says

    @property
    def channels(self) -> int:
        """Numbers of each row."""
        return 3 if self.kind == "vector" else 1

    def shape(self, num_rows: int) -> tuple[int, ...]:
        """Shape of its array: [rows] of a scalar, [rows, channels] of a vector."""
        return (num_rows, self.channels) if self.kind == "vector" else (num_rows,)


FIELDS = {
    field.name: field
    for field in (
        Field("position", "vector", "input", "m"),
        Field("normal", "vector", "input", "1"),
        Field("pressure", "scalar", "target"),
        Field("wall_shear", "vector", "target"),
        Field("area", "scalar", "weight", "m2"),
        Field("area_vector", "vector", "weight", "m2"),
    )
}
INPUT_FIELDS = tuple(name for name, field in FIELDS.items() if field.role == "input")
TARGET_FIELDS = tuple(name for name, field in FIELDS.items() if field.role == "target")


def channels_of(names: Iterable[str]) -> int:
    """Channels of several fields beside each other."""
    return sum(FIELDS[name].channels for name in names)


@dataclass(frozen=True)
class Axes:
    """How canonical axes lie in a source's: component i is `signs[i]` times its `order[i]`th."""

    order: tuple[int, ...] = (0, 1, 2)
    signs: tuple[int, ...] = (1, 1, 1)

    @classmethod
    def parse(cls, names: Sequence[str] | None) -> Axes:
        """Read `[x, -z, y]`; None are the source's own axes.

        Raises: DataError where they are not x, y and z once each.
        """
        listed = ["x", "y", "z"] if names is None else [str(name).strip() for name in names]
        letters = [name.lstrip("+-") for name in listed]
        if sorted(letters) != ["x", "y", "z"]:
            raise DataError(
                f"field map, axes is {listed}; it needs x, y and z once each, signs allowed"
            )
        signs = tuple(-1 if name.startswith("-") else 1 for name in listed)
        return cls(tuple("xyz".index(letter) for letter in letters), signs)

    @property
    def matrix(self) -> NDArray[np.float64]:
        """The turn [3, 3] from source to canonical axes: entries 0, 1 and −1."""
        return self.to_canonical(np.eye(3)).T

    def to_canonical(self, vectors: Array) -> Array:
        """Vectors [..., 3] from source to canonical axes, exact in any precision."""
        if self == Axes():
            return vectors
        return np.asarray(vectors[..., self.order] * np.asarray(self.signs, vectors.dtype))

    def to_source(self, vectors: Array) -> Array:
        """The inverse of `to_canonical`."""
        if self == Axes():
            return vectors
        back = np.empty_like(vectors)
        back[..., self.order] = vectors * np.asarray(self.signs, vectors.dtype)
        return back


@dataclass(frozen=True)
class SourceField:
    """How a field stands in a source: canonical = axes(source) · scale + offset.

    `names` are the source's arrays: one, or one a channel.
    """

    field: Field
    names: tuple[str, ...] = ()
    scale: float = 1.0
    offset: float = 0.0
    axes: Axes = Axes()

    def to_canonical(self, values: Array) -> Array:
        """Source values [N] or [N, 3] in canonical units and axes; float64 where they are scaled.

        Without a scale, an offset and other axes they are the same array.
        """
        if self.field.kind == "vector":
            values = self.axes.to_canonical(values)
        if (self.scale, self.offset) == (1.0, 0.0):
            return values
        return values.astype(np.float64) * self.scale + self.offset

    def to_source(self, values: Array, *, difference: bool = False) -> Array:
        """The inverse of `to_canonical`, keeping the dtype of `values`.

        `difference` leaves the offset out: it cancels in an error.
        """
        offset = 0.0 if difference else self.offset
        if (self.scale, offset) != (1.0, 0.0):
            values = ((values.astype(np.float64) - offset) / self.scale).astype(values.dtype)
        return self.axes.to_source(values) if self.field.kind == "vector" else values


def pick_names(
    aliases: Sequence[str], components: Sequence[str], present: Collection[str]
) -> tuple[str, ...]:
    """The arrays that make a field: its components where all are present, or its first alias."""
    if components and set(components) <= set(present):
        return tuple(components)
    return next(((alias,) for alias in aliases if alias in present), ())
