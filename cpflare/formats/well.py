"""The Well's HDF5 layout: trajectories of fields on a grid, read a few frames at a time.

An axis along which a field does not vary is absent in the file; here it is there again, with one
entry, so that a static field is [1, x, y, …] of every trajectory.
Source: PolymathicAI/the_well.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cpflare.errors import DataError
from cpflare.formats.array_files import HDF5File
from cpflare.formats.arrays import Index, open_arrays

Array = NDArray[Any]

_ORDERS: Final = ("t0_fields", "t1_fields", "t2_fields")


@dataclass(frozen=True)
class WellField:
    """A field: `order` 0 scalar, 1 vector, 2 tensor; and by what it varies."""

    name: str
    order: int
    by_sample: bool
    by_time: bool
    by_axis: tuple[bool, ...]

    @property
    def path(self) -> str:
        """Where its array is in the file."""
        return f"{_ORDERS[self.order]}/{self.name}"


class WellFile:
    """A file of The Well: its axes, fields, boundaries; a context that closes it.

    Example:
        with WellFile(path) as file:
            p = file.frames("pressure", trajectory=3, frames=slice(0, 4))  # [4, x, y]
    """

    def __init__(self, path: Path) -> None:
        """Open a file and check that its arrays have the shapes that its flags tell.

        Raises: DataError where it is absent, damaged, or of another layout.
        """
        file = open_arrays(path)
        if not isinstance(file, HDF5File):
            raise DataError(f"{path} is no HDF5 file; The Well's files end with .hdf5")
        self.file = file
        try:
            self._learn(file, path)
        except BaseException:
            file.close()
            raise

    def _learn(self, file: HDF5File, path: Path) -> None:
        root = file.attributes()
        missing = {"n_trajectories", "n_spatial_dims"} - root.keys()
        if missing:
            raise DataError(
                f"{path} has no attribute {min(missing)}; it is not laid out as The Well's files"
            )
        self.trajectories = int(root["n_trajectories"])
        self.parameters = {
            str(name): float(root[str(name)])
            for name in _names(root.get("simulation_parameters"))
            if np.size(root.get(str(name), ())) == 1
        }
        self.axes = _names(file.attributes("dimensions").get("spatial_dims"))
        self.times = file.read("dimensions/time")  # [T], or [trajectory, T]
        if self.times.ndim == 2 and not file.attributes("dimensions/time")["sample_varying"]:
            self.times = self.times[0]
        self.coordinates = {axis: file.read(f"dimensions/{axis}") for axis in self.axes}
        self.fields = {f.name: f for order in range(3) for f in self._fields_of(order)}
        for field in self.fields.values():
            file.expect(field.path, self._shape(field))

    @property
    def num_frames(self) -> int:
        """Frames of each trajectory."""
        return int(self.times.shape[-1])

    @property
    def grid(self) -> tuple[int, ...]:
        """Points along each axis."""
        return tuple(self.coordinates[axis].shape[-1] for axis in self.axes)

    def frames(self, name: str, trajectory: int, frames: slice = slice(None)) -> Array:
        """A field's frames [t, x, y(, z), D…] of a trajectory; [1, …] of one that is static.

        An axis along which it does not vary has length 1.

        Raises: DataError where there is no such field, trajectory or frame.
        """
        field = self._field(name)
        if not 0 <= trajectory < self.trajectories:
            raise DataError(
                f"{self.file.path} has trajectories 0 to {self.trajectories - 1}, not {trajectory}"
            )
        parts: list[slice | int] = [trajectory] if field.by_sample else []
        if field.by_time:
            if not range(self.num_frames)[frames]:
                raise DataError(
                    f"{self.file.path} has frames 0 to {self.num_frames - 1}, none in {frames}"
                )
            parts.append(frames)
        index: Index = tuple(parts)
        found = self.file.read(field.path, index)
        if not field.by_time:
            found = found[None]
        for axis, varies in enumerate(field.by_axis):
            if not varies:
                found = np.expand_dims(found, axis + 1)
        return found

    def boundaries(self) -> dict[str, str]:
        """What the sides are, by axis: WALL, OPEN or PERIODIC, as the file says."""
        out: dict[str, str] = {}
        group = self.file.file.get("boundary_conditions", {})
        for item in group.values():
            kind = item.attrs["bc_type"]
            for axis in _names(item.attrs.get("associated_dims")):
                out[axis] = kind.decode() if isinstance(kind, bytes) else str(kind)
        return out

    def _field(self, name: str) -> WellField:
        if name not in self.fields:
            raise DataError(
                f"{self.file.path} has no field '{name}'; it has {', '.join(self.fields)}"
            )
        return self.fields[name]

    def _fields_of(self, order: int) -> list[WellField]:
        group = _ORDERS[order]
        out = []
        for name in _names(self.file.attributes(group).get("field_names")):
            flags = self.file.attributes(f"{group}/{name}")
            by_axis = tuple(bool(v) for v in flags["dim_varying"])
            by_sample, by_time = bool(flags["sample_varying"]), bool(flags["time_varying"])
            out.append(WellField(name, order, by_sample, by_time, by_axis))
        return out

    def _shape(self, field: WellField) -> tuple[int | None, ...]:
        grid = [n for n, varies in zip(self.grid, field.by_axis, strict=True) if varies]
        sample = [self.trajectories] if field.by_sample else []
        time = [self.num_frames] if field.by_time else []
        return (*sample, *time, *grid, *[len(self.axes)] * field.order)

    def __enter__(self) -> WellFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.file.close()


def _names(value: Any) -> list[str]:
    """A list of texts as HDF5 has it; nothing where it is empty or absent."""
    if not isinstance(value, np.ndarray | list | tuple):
        return []
    return [v.decode() if isinstance(v, bytes) else str(v) for v in value]
