"""The embedded data set: closed mixed meshes, files like DrivAerML's, forces in a car's range."""

from __future__ import annotations

import csv
import filecmp
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import pyvista as pv
from numpy.typing import NDArray

import data_prep.cars.synthetic as synthetic
from cpflare.errors import ConfigError, DataError
from data_prep.cars.bodies import GROUND, RANGES, Body, draw_shape
from data_prep.cars.body_mesh import Lattice, SurfaceGrid
from data_prep.cars.flow import COARSE, CarFlow
from data_prep.cars.synthetic import CONSTANT_AREA, DYNAMIC_PRESSURE, synthesise

pytestmark = pytest.mark.slow

Array = NDArray[np.float64]
CELLS = 3000


class Surface(NamedTuple):
    """A surface as the file holds it: polygons in stored order."""

    points: Array
    corners: NDArray[np.int64]
    sizes: NDArray[np.int64]
    fields: dict[str, Array]

    @classmethod
    def read(cls, path: Path) -> Surface:
        mesh = pv.read(path)
        cells = mesh.GetPolys()
        offsets = pv.convert_array(cells.GetOffsetsArray())
        corners = pv.convert_array(cells.GetConnectivityArray())
        assert mesh.n_cells == len(offsets) - 1
        fields = {name: mesh.cell_data[name].astype(np.float64) for name in mesh.cell_data}
        sizes = np.diff(offsets)
        return cls(mesh.points.astype(np.float64), corners.astype(np.int64), sizes, fields)

    def area_vectors(self) -> tuple[Array, Array]:
        """Mean corners and area vectors, polygon by polygon: slow and plain."""
        middles, vectors = [], []
        ends = np.cumsum(self.sizes)
        for start, end in zip(ends - self.sizes, ends, strict=True):
            at = self.points[self.corners[start:end]]
            arm = at - at.mean(axis=0)
            middles.append(at.mean(axis=0))
            vectors.append(0.5 * np.cross(arm, np.roll(arm, -1, axis=0)).sum(axis=0))
        return np.array(middles), np.array(vectors)

    def edges(self) -> NDArray[np.int64]:
        """Directed edges [e, 2] of all polygons."""
        following = np.roll(self.corners, -1)
        ends = np.cumsum(self.sizes)
        following[ends - 1] = self.corners[ends - self.sizes]
        return np.stack([self.corners, following], axis=1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Eight cases of about 3,000 cells."""
    return synthesise(tmp_path_factory.mktemp("synth"), cases=8, cells=CELLS, seed=0)


@pytest.fixture(scope="module")
def surfaces(made: list[Path]) -> list[Surface]:
    return [Surface.read(path) for path in made]


def table(path: Path) -> dict[str, str]:
    """A CSV file's header and its single row."""
    with path.open(newline="") as file:
        names, values = list(csv.reader(file, skipinitialspace=True))
    return dict(zip(names, values, strict=True))


def test_files_lie_as_drivaerml_lays_them(made: list[Path]) -> None:
    for number, path in enumerate(made, start=1):
        assert path.parts[-2:] == (f"run_{number}", f"boundary_{number}.vtp")
        assert {p.name for p in path.parent.iterdir()} == {
            path.name,
            f"force_mom_{number}.csv",
            f"force_mom_constref_{number}.csv",
            f"geo_parameters_{number}.csv",
            f"geo_ref_{number}.csv",
        }


def test_the_encoding_is_openfoams(made: list[Path]) -> None:
    text = made[0].read_bytes()
    assert text.startswith(b"<?xml version='1.0'?>\n")
    assert b"byte_order='LittleEndian' header_type='UInt64'" in text
    assert b"<DataArray type='Int32' Name='connectivity' format='binary'>" in text
    assert b"compressor" not in text
    mesh = pv.read(made[0])
    assert [mesh.points.dtype, *(mesh.cell_data[n].dtype for n in mesh.cell_data)] == [
        np.dtype(np.float32)
    ] * 5
    assert list(mesh.cell_data.keys()) == [
        "pMeanTrim",
        "CpMeanTrim",
        "pPrime2MeanTrim",
        "wallShearStressMeanTrim",
    ]
    assert list(mesh.point_data.keys()) == []
    assert mesh.field_data["TimeValue"][0] > 0


@pytest.mark.slow
def test_surfaces_are_closed_and_their_winding_points_into_the_body(
    surfaces: list[Surface],
) -> None:
    for surface in surfaces:
        edges = surface.edges()
        count = len(surface.points)
        forward = edges[:, 0] * count + edges[:, 1]
        backward = edges[:, 1] * count + edges[:, 0]
        # Every edge once in each direction: closed, and no polygon turned the wrong way.
        assert len(np.unique(forward)) == len(forward)
        assert np.array_equal(np.sort(forward), np.sort(backward))
        # A sphere's Euler characteristic: one piece, no handles, no loose points.
        assert count - len(edges) // 2 + len(surface.sizes) == 2
        middle, vector = surface.area_vectors()
        area = np.linalg.norm(vector, axis=1)
        assert np.abs(vector.sum(axis=0)).max() < 1e-12 * area.sum()
        volume = np.einsum("nc,nc->", middle, vector) / 3.0
        assert -12.0 < volume < -5.0  # m³, negative as the winding is inward
        assert area.min() > 0.0


def test_cells_are_mixed_and_mostly_quads(surfaces: list[Surface]) -> None:
    for surface in surfaces:
        share = np.bincount(surface.sizes, minlength=7) / len(surface.sizes)
        assert share[:3].sum() == 0
        assert share[4] > 0.8
        assert min(share[3], share[5], share[6]) > 0.005
        assert abs(len(surface.sizes) - CELLS) < 0.03 * CELLS
    assert len({len(surface.sizes) for surface in surfaces}) > 1


@pytest.mark.parametrize("cells", [400, 1000, 7777, 50_000, 8_600_000])
def test_lattices_have_the_cells_asked_for(cells: int) -> None:
    lattice = Lattice.with_cells(cells)
    quads = lattice.nx * lattice.around + 2 * lattice.ny * lattice.nz
    assert abs(quads - cells) < 0.05 * cells
    if cells < 10_000:
        ids = lattice.quads()
        assert len(ids) == quads
        assert np.array_equal(np.unique(ids), np.arange(lattice.num_vertices))


def test_the_cars_are_of_a_cars_size(surfaces: list[Surface]) -> None:
    for surface in surfaces:
        low, high = surface.points.min(axis=0), surface.points.max(axis=0)
        size = high - low
        assert 4.0 < size[0] < 5.2
        assert 1.75 < size[1] < 2.25
        assert 1.35 < size[2] < 1.66
        # The tyres reach the ground, to within their squashed shoulders.
        assert GROUND <= low[2] < GROUND + 0.015


@pytest.mark.slow
def test_forces_follow_from_the_files(made: list[Path], surfaces: list[Surface]) -> None:
    """F = Σ (p·A − τ·|A|) with stored winding and shear, as for DrivAerML."""
    for path, surface in zip(made, surfaces, strict=True):
        number = path.parent.name.removeprefix("run_")
        middle, vector = surface.area_vectors()
        area = np.linalg.norm(vector, axis=1)
        shear = surface.fields["wallShearStressMeanTrim"]
        force = surface.fields["pMeanTrim"][:, None] * vector - shear * area[:, None]
        centre = np.array([1.40009, 0.0, -0.3176])
        scale = 1.0 / (DYNAMIC_PRESSURE * CONSTANT_AREA)
        drag, side, lift = force.sum(axis=0) * scale
        pitch = np.cross(middle - centre, force).sum(axis=0)[1] * scale / 2.78618
        expected = {
            "Cd": drag,
            "Cl": lift,
            "Clf": lift / 2 + pitch,
            "Clr": lift / 2 - pitch,
            "Cs": side,
        }
        written = table(path.parent / f"force_mom_constref_{number}.csv")
        assert list(written) == list(expected)
        for name, value in expected.items():
            # Float32 fields of a few hundred m²/s², summed over 20 m²: 1e-6 of them.
            assert float(written[name]) == pytest.approx(value, abs=2e-6)
        own = table(path.parent / f"force_mom_{number}.csv")
        area_ref = float(table(path.parent / f"geo_ref_{number}.csv")["aRef"])
        assert float(own["Cd"]) * area_ref == pytest.approx(drag * CONSTANT_AREA, rel=1e-5)


def test_drag_is_a_cars_and_varies_with_the_shape(made: list[Path]) -> None:
    drag = []
    for path in made:
        number = path.parent.name.removeprefix("run_")
        drag.append(float(table(path.parent / f"force_mom_{number}.csv")["Cd"]))
    assert min(drag) > 0.2
    assert max(drag) < 0.5
    assert max(drag) - min(drag) > 0.03


@pytest.mark.slow
def test_fields_are_in_kinematic_units(surfaces: list[Surface]) -> None:
    for surface in surfaces:
        pressure, cp = surface.fields["pMeanTrim"], surface.fields["CpMeanTrim"]
        np.testing.assert_allclose(pressure, cp * 0.5 * 38.889**2, rtol=1e-5, atol=1e-4)
        # A stagnation point in front, suction of no more than a car's.
        assert 0.9 < cp.max() <= 1.0
        assert -4.0 < cp.min() < -0.7
        assert (surface.fields["pPrime2MeanTrim"] > 0).all()
        shear = surface.fields["wallShearStressMeanTrim"]
        # Stored with the opposite sign of the traction: the stream drags the body downstream.
        assert -3.0 < shear[:, 0].mean() < -0.5
        _, vector = surface.area_vectors()
        normal = vector / np.linalg.norm(vector, axis=1)[:, None]
        assert np.abs(np.einsum("nc,nc->n", shear, normal)).max() < 1e-5


@pytest.mark.slow
def test_fields_mirror_in_the_middle_plane(surfaces: list[Surface]) -> None:
    """Left and right differ only by how the quads were cut there."""
    surface = surfaces[0]
    middle, _ = surface.area_vectors()
    quads = surface.sizes == 4
    key = np.round(middle[quads] * [1, 0, 1] + np.abs(middle[quads]) * [0, 1, 0], 4)
    _, group, count = np.unique(key, axis=0, return_inverse=True, return_counts=True)
    pairs = np.argsort(group, kind="stable")
    pairs = pairs[np.repeat(count == 2, count)].reshape(-1, 2)
    assert len(pairs) > 500
    cp = surface.fields["CpMeanTrim"][quads]
    np.testing.assert_allclose(cp[pairs[:, 0]], cp[pairs[:, 1]], atol=2e-4)


@pytest.mark.slow
def test_the_base_has_one_pressure() -> None:
    flow = CarFlow(Body(draw_shape(0, 1)))
    normal = np.array([[1.0, 0.0, 0.0]])
    for height in (0.2, 0.4):
        point = np.array([[flow.body.x_tail, 0.1, height]])
        state = flow.evaluate(point, normal, np.array([[0.3, 0.2, 0.1, 0.14]]))
        assert state.pressure_coefficient[0] == pytest.approx(flow.base_pressure, abs=0.02)


@pytest.mark.slow
def test_a_fine_mesh_has_the_coarse_meshs_forces(tmp_path: Path) -> None:
    """The flow is solved once on the coarse lattice: cells only sample it."""
    drag = []
    for cells in (4000, 40_000):
        out = tmp_path / str(cells)
        synthesise(out, cases=1, cells=cells, seed=5)
        drag.append(float(table(out / "run_1" / "force_mom_1.csv")["Cd"]))
    assert drag[0] == pytest.approx(drag[1], rel=0.03)


@pytest.mark.slow
def test_a_case_depends_on_seed_and_number_alone(made: list[Path], tmp_path: Path) -> None:
    again = synthesise(tmp_path / "two", cases=2, cells=CELLS, seed=0, workers=2)
    for path in again:
        number = path.parent.name.removeprefix("run_")
        for file in path.parent.iterdir():
            twin = made[int(number) - 1].parent / file.name
            assert filecmp.cmp(file, twin, shallow=False), file.name
    other = synthesise(tmp_path / "other", cases=1, cells=CELLS, seed=1)
    assert not filecmp.cmp(other[0], made[0], shallow=False)


@pytest.mark.slow
def test_blocks_leave_the_file_as_it_is(
    made: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthetic, "_BLOCK_CELLS", 150)
    whole = Surface.read(made[0])
    blocked = Surface.read(synthesise(tmp_path, cases=1, cells=CELLS, seed=0)[0])
    assert np.array_equal(whole.corners, blocked.corners)
    # Vector and scalar code of the same functions may round differently.
    np.testing.assert_allclose(whole.points, blocked.points, atol=1e-6)
    for name, values in whole.fields.items():
        np.testing.assert_allclose(values, blocked.fields[name], rtol=1e-4, atol=1e-2)


def test_parameters_are_written_with_drivaermls_names(made: list[Path]) -> None:
    names = (
        "Vehicle_Length, Vehicle_Width, Vehicle_Height, Front_Overhang, Front_Planview, "
        "Hood_Angle, Approach_Angle, Windscreen_Angle, Greenhouse_Tapering, Backlight_Angle, "
        "Decklid_Height, Rearend_tapering, Rear_Overhang, Rear_Diffusor_Angle, "
        "Vehicle_Ride_Height, Vehicle_Pitch, Body_Style"
    )
    for path in made:
        number = path.parent.name.removeprefix("run_")
        file = path.parent / f"geo_parameters_{number}.csv"
        assert file.read_text().splitlines()[0] == names
        values = {name.lower(): float(value) for name, value in table(file).items()}
        for name, span in RANGES.items():
            assert span.low <= values[name] <= span.high
    reference = table(made[0].parent / "geo_ref_1.csv")
    assert list(reference) == ["lRef", "aRef", "forcesCoR", "lRefRef", "aRefRef", "forcesCoRRef"]
    assert 1.9 < float(reference["aRef"]) < 3.1


def test_the_map_of_the_body_folds_nowhere() -> None:
    """Twelve more shapes: every quad of the solver's lattice faces outwards of its neighbours."""
    for case in range(9, 21):
        grid = SurfaceGrid(Body(draw_shape(0, case)), COARSE)
        corners = grid.vertices[COARSE.quads()]
        middle = corners.mean(axis=1)
        turns = [
            np.cross(corners[:, k] - middle, corners[:, (k + 1) % 4] - middle) for k in range(4)
        ]
        total = np.sum(turns, axis=0)
        # All four triangles about the middle turn the way the quad does.
        assert min(np.einsum("nc,nc->n", turn, total).min() for turn in turns) > 0.0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"cases": 0}, "cases=0: at least 1 is needed; set --cases 8"),
        ({"cells": 10}, "cells=10: a body needs 400 to 400,000,000 cells; set --cells 20000"),
        ({"seed": -1}, "seed=-1: seeds are not negative; set --seed 0"),
        ({"workers": 0}, "workers=0: at least 1 is needed; set --workers 1"),
    ],
    ids=["cases", "cells", "seed", "workers"],
)
def test_numbers_that_cannot_be_met(wrong: dict[str, int], message: str, tmp_path: Path) -> None:
    numbers = {"cases": 1, "cells": 1000, "seed": 0, "workers": 1} | wrong
    with pytest.raises(DataError, match=f"^{message}$"):
        synthesise(tmp_path / "out", **numbers)
    assert not (tmp_path / "out").exists()


def test_an_output_that_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "out"
    file.write_text("")
    with pytest.raises(DataError, match="is a file; give the name of a folder"):
        synthesise(file, cases=1, cells=1000, seed=0)


@pytest.mark.slow
def test_a_failed_case_leaves_no_surface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A surface is there whole or not at all."""

    def fail(*_: object) -> None:
        raise RuntimeError("disk full")

    monkeypatch.setattr(synthetic, "_write_cells", fail)
    with pytest.raises(RuntimeError, match="disk full"):
        synthesise(tmp_path, cases=1, cells=1000, seed=0)
    assert list((tmp_path / "run_1").iterdir()) == []


def test_a_kind_that_is_not_made_is_named_with_those_that_are(tmp_path):
    from cpflare import cli

    with pytest.raises(ConfigError, match="--kind boats must be one of cars, darcy, "):
        cli.synth(tmp_path / "out", kind="boats", cases=1, cells=400, seed=0, workers=1)
    assert not (tmp_path / "out").exists()
