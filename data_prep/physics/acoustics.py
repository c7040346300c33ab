"""Acoustic scattering in static media, laid out as The Well's sets: HDF5, 100 trajectories a file.

`data/{train,valid,test}/acoustic_scattering_MEDIUM_chunk_K.hdf5` with pressure (t0), velocity (t1),
density and speed_of_sound (t0, not varying in time), float32. Waves are computed on a grid twice as
fine and averaged; the walls are those across x, and the sides across y are open.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import h5py
import numpy as np
from numpy.typing import NDArray

from cpflare.files import written_aside
from data_prep.physics import media
from data_prep.physics.making import Case, Request, claim, generator, made
from data_prep.physics.wave import BULK_MODULUS, Side, Wave

Array = NDArray[np.float64]

CELLS: Final = (256, 1_048_576)
FINER: Final = 2  # cells computed along a side of each that is written
WIDTH: Final = 2.0  # of the box [−1, 1]²
SIDES: Final[tuple[Side, Side]] = ("wall", "open")
_A_FILE: Final = 100  # trajectories
_HELD_OUT: Final = 0.1  # of the trajectories, for validation and for the test each
_SPANS: Final = {"discontinuous": 2.0, "inclusions": 2.0, "maze": 4.0}  # units of time
_FRAMES: Final = {"discontinuous": 102, "inclusions": 102, "maze": 202}


def make_set(
    out: Path, *, medium: str, cases: int, cells: int, seed: int, workers: int = 1
) -> list[Path]:
    """Write `cases` trajectories on n×n ≈ `cells` cells under `out`, the last for valid and test.

    Raises: DataError for numbers that cannot be met, or files there that others made.
    """
    request = Request(f"acoustics_{medium}", cases, cells, seed)
    request.check(CELLS)
    plan = files_of(out, medium, cases)
    claim(out, request, [path for path, _ in plan])
    ready = made(partial(make_case, medium), request, workers)
    for path, numbers in plan:
        with written_aside(path) as aside, h5py.File(aside, "w") as file:
            _lay_out(file, medium, request.side, len(numbers), seed)
            _fill(file, ready, len(numbers))
    return [path for path, _ in plan]


def files_of(out: Path, medium: str, cases: int) -> list[tuple[Path, range]]:
    """The set's files with the numbers of their cases: the first for training, then valid, test."""
    held = round(_HELD_OUT * cases) if cases >= 10 else min(1, (cases - 1) // 2)
    parts = {
        "train": range(1, cases - 2 * held + 1),
        "valid": range(cases - 2 * held + 1, cases - held + 1),
        "test": range(cases - held + 1, cases + 1),
    }
    name = f"acoustic_scattering_{medium}_chunk_{{}}.hdf5"
    return [
        (out / "data" / part / name.format(chunk), numbers[start : start + _A_FILE])
        for part, numbers in parts.items()
        for chunk, start in enumerate(range(0, len(numbers), _A_FILE))
    ]


def make_case(medium: str, request: Request, case: int) -> Case:
    """Pressure [T, n, n], velocity [T, n, n, 2], density and speed_of_sound [n, n], float32."""
    cells = FINER * request.side
    density, is_free = media.MEDIA[medium](generator(request.seed, case), cells)
    start = media.rings(generator(request.seed, case, 1), is_free)
    frames = _FRAMES[medium]
    wave = Wave(density, WIDTH, SIDES)
    pressure = np.empty((frames, request.side, request.side), np.float32)
    velocity = np.empty((*pressure.shape, 2), np.float32)
    spacing = _SPANS[medium] / (frames - 1)
    for number, frame in enumerate(wave.run(start, frames, spacing)):
        pressure[number] = _coarse(frame.pressure)
        velocity[number] = _coarse(frame.velocity)
    mean = _coarse(density)
    return {
        "pressure": pressure,
        "velocity": velocity,
        "density": mean.astype(np.float32),
        "speed_of_sound": np.sqrt(BULK_MODULUS / mean).astype(np.float32),
    }


def _coarse(values: Array) -> Array:
    """Means of FINER × FINER cells of [m, m, …]."""
    # Sums of slices: a mean over two axes of a reshaped array takes five times as long.
    steps = range(FINER)
    total = sum(values[i::FINER, j::FINER] for i in steps for j in steps)
    return np.asarray(total / FINER**2)


def _lay_out(file: h5py.File, medium: str, side: int, trajectories: int, seed: int) -> None:
    """Everything but the values that vary: dimensions, boundaries, and empty fields."""
    frames = _FRAMES[medium]
    file.attrs.update(
        dataset_name=f"acoustic_scattering_{medium}",
        grid_type="cartesian",
        n_spatial_dims=2,
        n_trajectories=trajectories,
        simulation_parameters=[],
        seed=seed,
    )
    dimensions = file.create_group("dimensions")
    dimensions.attrs["spatial_dims"] = ["x", "y"]
    times = np.linspace(0.0, _SPANS[medium], frames, dtype=np.float32)
    at = media.centres(side).astype(np.float32)
    for name, values in (("time", times), ("x", at), ("y", at)):
        made_ = dimensions.create_dataset(name, data=values)
        made_.attrs.update(sample_varying=False, time_varying=name == "time")
    file.create_group("scalars").attrs["field_names"] = h5py.Empty("S1")
    _write_boundaries(file.create_group("boundary_conditions"), side)
    shape = (trajectories, frames, side, side)
    fields: dict[str, dict[str, tuple[tuple[int, ...], bool]]] = {
        "t0_fields": {
            "pressure": (shape, True),
            "density": ((trajectories, side, side), False),
            "speed_of_sound": ((trajectories, side, side), False),
        },
        "t1_fields": {"velocity": ((*shape, 2), True)},
        "t2_fields": {},
    }
    for group_name, members in fields.items():
        group = file.create_group(group_name)
        group.attrs["field_names"] = list(members) or h5py.Empty("S1")
        for name, (size, varies) in members.items():
            # A frame of a trajectory is what is read at once.
            chunks = (1, 1, *size[2:]) if varies else (1, *size[1:])
            field = group.create_dataset(name, size, np.float32, chunks=chunks)
            field.attrs.update(dim_varying=[True, True], sample_varying=True, time_varying=varies)


def _write_boundaries(group: h5py.Group, side: int) -> None:
    for axis, kind in zip(("x", "y"), SIDES, strict=True):
        edge = group.create_group(f"{axis}_{kind}")
        edge.attrs.update(
            associated_dims=[axis],
            associated_fields=[],
            bc_type=kind.upper(),
            sample_varying=False,
            time_varying=False,
        )
        mask = np.zeros(side, bool)
        mask[[0, -1]] = True
        edge.create_dataset("mask", data=mask)


def _fill(file: h5py.File, ready: Iterator[tuple[int, Case]], trajectories: int) -> None:
    for row in range(trajectories):
        _, case = next(ready)
        for name, values in case.items():
            group = "t1_fields" if name == "velocity" else "t0_fields"
            file[group][name][row] = values
