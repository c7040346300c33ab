"""The embedded data set: parametric cars with pressure and wall shear, as DrivAerML lays files out.

`cpflare synth OUT --cases 8 --cells 20000` writes OUT/run_1/boundary_1.vtp … with the forces and
the parameters beside it. A case is a function of (seed, case number) alone, at any size of mesh.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from cpflare.errors import DataError
from cpflare.files import written_aside
from data_prep.cars.bodies import GROUND, Body, Shape, draw_shape
from data_prep.cars.body_mesh import (
    PAIR_SHARES,
    Block,
    Lattice,
    SurfaceGrid,
    blocks,
    cell_values,
    cut_polygons,
)
from data_prep.cars.flow import SPEED, CarFlow
from data_prep.cars.vtp_stream import SurfaceWriter

Array = NDArray[np.float64]

DYNAMIC_PRESSURE: Final = 0.5 * SPEED**2  # m²/s²
# DrivAerML's constant references: area m², length m, centre m.
CONSTANT_AREA: Final = 2.17
CONSTANT_LENGTH: Final = 2.78618
CONSTANT_CENTRE: Final = (1.40009, 0.0, -0.3176)
MIN_CELLS: Final = 400
MAX_CELLS: Final = 400_000_000  # the connectivity is Int32
_FIELDS: Final = {
    "pMeanTrim": 1,
    "CpMeanTrim": 1,
    "pPrime2MeanTrim": 1,
    "wallShearStressMeanTrim": 3,
}
_FILES: Final = (
    "boundary_{}.vtp",
    "geo_parameters_{}.csv",
    "force_mom_{}.csv",
    "force_mom_constref_{}.csv",
    "geo_ref_{}.csv",
)
_BLOCK_CELLS: Final = 200_000
# DrivAerML's columns are the parameters' names with capitals, but for this one.
_COLUMNS: Final = {"rearend_tapering": "Rearend_tapering"}


@dataclass(frozen=True)
class Reference:
    """Reference area (m²), length (m) and centre (m) of force coefficients."""

    area: float
    length: float
    centre: tuple[float, float, float]


@dataclass
class Loads:
    """Force [3] and moment [3] about the origin on the body, over rho = 1: m⁴/s², m⁵/s²."""

    force: Array
    moment: Array

    def coefficients(self, reference: Reference) -> dict[str, float]:
        """Cd, Cl, Clf, Clr and Cs for a reference."""
        scale = 1.0 / (DYNAMIC_PRESSURE * reference.area)
        moment = self.moment - np.cross(np.array(reference.centre), self.force)
        lift = float(self.force[2]) * scale
        pitch = float(moment[1]) * scale / reference.length
        return {
            "Cd": float(self.force[0]) * scale,
            "Cl": lift,
            "Clf": 0.5 * lift + pitch,
            "Clr": 0.5 * lift - pitch,
            "Cs": float(self.force[1]) * scale,
        }


def synthesise(out: Path, *, cases: int, cells: int, seed: int, workers: int = 1) -> list[Path]:
    """Make cases 1 … `cases` of about `cells` cells each under `out`; returns the surfaces' paths.

    `workers` processes share the cases; the files do not depend on how many there are.

    Raises: DataError for numbers that cannot be met, or files there that this seed did not make.
    """
    if cases < 1:
        raise DataError(f"cases={cases}: at least 1 is needed; set --cases 8")
    if not MIN_CELLS <= cells <= MAX_CELLS:
        raise DataError(
            f"cells={cells}: a body needs {MIN_CELLS:,} to {MAX_CELLS:,} cells; set --cells 20000"
        )
    if seed < 0:
        raise DataError(f"seed={seed}: seeds are not negative; set --seed 0")
    if workers < 1:
        raise DataError(f"workers={workers}: at least 1 is needed; set --workers 1")
    if out.exists() and not out.is_dir():
        raise DataError(f"{out}: is a file; give the name of a folder")
    for case in range(1, cases + 1):
        _refuse_replacing(out, case, seed)
    out.mkdir(parents=True, exist_ok=True)
    paths: dict[int, Path] = {}
    with tqdm(total=cases, unit="case", desc="synth", disable=None) as bar:
        for case, path in _run(out, range(1, cases + 1), cells, seed, min(workers, cases)):
            paths[case] = path
            bar.update()
    return [paths[case] for case in sorted(paths)]


def _run(
    out: Path, cases: range, cells: int, seed: int, workers: int
) -> Iterator[tuple[int, Path]]:
    if workers == 1:
        for case in cases:
            yield case, write_case(out, case, cells, seed)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = {pool.submit(write_case, out, case, cells, seed): case for case in cases}
        for job in as_completed(jobs):
            yield jobs[job], job.result()


def _refuse_replacing(out: Path, case: int, seed: int) -> None:
    """Refuse a case whose files are there, unless its table of parameters is this seed's."""
    folder = out / f"run_{case}"
    there = [path for name in _FILES if (path := folder / name.format(case)).exists()]
    table = folder / f"geo_parameters_{case}.csv"
    own = there and table.is_file() and table.read_bytes() == _parameters(seed, case).encode()
    if there and not own:
        raise DataError(
            f"{there[0]} is there already, and not of --seed {seed}; name another folder, or "
            "remove it"
        )


def _parameters(seed: int, case: int) -> str:
    """The table of a case's parameters."""
    parameters = asdict(draw_shape(seed, case))
    names = [_COLUMNS.get(name, name.title()) for name in parameters]
    return _table(", ", names, [f"{v:.6g}" for v in parameters.values()])


def write_case(out: Path, case: int, cells: int, seed: int) -> Path:
    """Write one case's folder and return the path of its surface."""
    folder = out / f"run_{case}"
    folder.mkdir(exist_ok=True)
    shape = draw_shape(seed, case)
    body = Body(shape)
    flow = CarFlow(body)
    grid = SurfaceGrid(body, Lattice.with_cells(cells))
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, case, 1))))
    loads = Loads(np.zeros(3), np.zeros(3))
    path = folder / f"boundary_{case}.vtp"
    with SurfaceWriter(path, _FIELDS, time=3.0) as writer:
        for block in blocks(grid, _BLOCK_CELLS):
            writer.add_points(_new_points(grid, block))
            _write_cells(writer, grid, block, flow, rng, loads)
        # Before the surface is there: they tell whose it is, should this be stopped.
        _write_text(folder / f"geo_parameters_{case}.csv", _parameters(seed, case))
        _write_tables(folder, case, shape, frontal_area(body), loads)
    return path


def _new_points(grid: SurfaceGrid, block: Block) -> NDArray[np.float32]:
    """The block's points that no earlier block has, in the order of their ids."""
    lattice = grid.lattice
    points = block.points
    if block.part == "strip":
        last = block.rows.stop > lattice.nx
        points = points[: None if last else -1, :-1]
    else:
        first, last = block.rows.start == 0, block.rows.stop > lattice.nz
        points = points[1 if first else 0 : -1, 1:-1]
    return points.reshape(-1, 3).astype(np.float32)


def _write_cells(
    writer: SurfaceWriter,
    grid: SurfaceGrid,
    block: Block,
    flow: CarFlow,
    rng: np.random.Generator,
    loads: Loads,
) -> None:
    a, b = block.ids.shape[0] - 1, block.ids.shape[1] - 1
    limits = np.cumsum(PAIR_SHARES[:-1])
    kinds = np.searchsorted(limits, rng.random(a * b // 2)).astype(np.int8)
    polygons = cut_polygons((a, b), block.flip, kinds)
    points = block.points.reshape(-1, 3).astype(np.float32).astype(np.float64)
    centre, vector = polygon_geometry(points, polygons.corners, polygons.sizes)
    area = np.linalg.norm(vector, axis=1)
    normal = vector / area[:, None]
    fields = cell_values(polygons, *flow.fields_on(grid.lattice, block))
    state = flow.evaluate(centre, normal, fields)

    pressure = DYNAMIC_PRESSURE * state.pressure_coefficient
    traction_force = state.traction * area[:, None]
    force = traction_force - pressure[:, None] * vector
    loads.force += force.sum(axis=0)
    loads.moment += np.cross(centre, force).sum(axis=0)

    # Polygons are counter-clockwise seen from outside; DrivAerML's point into the body.
    ends = np.cumsum(polygons.sizes)
    starts = ends - polygons.sizes
    place = np.arange(ends[-1])
    turned = np.repeat(starts + ends - 1, polygons.sizes) - place
    writer.add_cells(
        block.ids.ravel()[polygons.corners[turned]],
        polygons.sizes,
        {
            "pMeanTrim": pressure,
            "CpMeanTrim": state.pressure_coefficient,
            "pPrime2MeanTrim": (DYNAMIC_PRESSURE * state.fluctuation) ** 2,
            "wallShearStressMeanTrim": -state.traction,
        },
    )


def polygon_geometry(
    points: Array, corners: NDArray[np.int64], sizes: NDArray[np.int64]
) -> tuple[Array, Array]:
    """Mean of the corners [n, 3] and area vectors [n, 3] of polygons given by their corners."""
    starts = np.cumsum(sizes) - sizes
    at = points[corners]
    centre = np.add.reduceat(at, starts, axis=0) / sizes[:, None]
    following = np.arange(1, len(corners) + 1)
    following[starts + sizes - 1] = starts
    arm = at - np.repeat(centre, sizes, axis=0)
    vector = 0.5 * np.add.reduceat(np.cross(arm, arm[following]), starts, axis=0)
    return np.asarray(centre), np.asarray(vector)


def frontal_area(body: Body) -> float:
    """Area of the body's outline seen from ahead, m²: the tallest column at each y."""
    points = SurfaceGrid(body, Lattice(160, 96, 60)).vertices
    bins = np.linspace(0.0, points[:, 1].max(), 49)
    column = np.clip(np.digitize(np.abs(points[:, 1]), bins) - 1, 0, len(bins) - 2)
    top = np.full(len(bins) - 1, -np.inf)
    low = np.full(len(bins) - 1, np.inf)
    np.maximum.at(top, column, points[:, 2])
    np.minimum.at(low, column, points[:, 2])
    return float(2.0 * ((top - low) * np.diff(bins)).sum())


def _write_tables(folder: Path, case: int, shape: Shape, area: float, loads: Loads) -> None:
    own = Reference(area, shape.wheelbase, (0.5 * shape.wheelbase, 0.0, GROUND))
    constant = Reference(CONSTANT_AREA, CONSTANT_LENGTH, CONSTANT_CENTRE)
    for name, reference in (("force_mom", own), ("force_mom_constref", constant)):
        values = loads.coefficients(reference)
        table = _table(",", list(values), [f"{v:.9g}" for v in values.values()])
        _write_text(folder / f"{name}_{case}.csv", table)
    header = ["lRef", "aRef", "forcesCoR", "lRefRef", "aRefRef", "forcesCoRRef"]
    row = []
    for reference in (own, constant):
        centre = " ".join(f"{value:.6g}" for value in reference.centre)
        row += [f"{reference.length:.6g}", f"{reference.area:.6g}", f"({centre})"]
    _write_text(folder / f"geo_ref_{case}.csv", _table(",", header, row))


def _table(separator: str, names: list[str], values: list[str]) -> str:
    return separator.join(names) + "\n" + separator.join(values) + "\n"


def _write_text(path: Path, text: str) -> None:
    with written_aside(path) as aside:
        aside.write_text(text)
