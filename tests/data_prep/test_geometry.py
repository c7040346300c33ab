"""Area vectors, centres, normals and dual areas against loops and closed forms."""

from __future__ import annotations

import numpy as np
import pytest

from cpflare.errors import DataError
from data_prep.geometry import (
    BLOCK,
    STRIP,
    VERTEX,
    Surface,
    average_to_cells,
    dual_areas,
    edge_report,
    measure,
    unit_normals,
)
from support.surfaces import Polygons, cube, tube


def surface(mesh: Polygons) -> Surface:
    offsets = np.concatenate([[0], np.cumsum([len(f) for f in mesh.faces])])
    return Surface(mesh.points, np.concatenate(mesh.faces), offsets)


def area_by_loop(points: np.ndarray, face: list[int]) -> np.ndarray:
    """½ Σ (v_i − c) × (v_{i+1} − c), the formula as the data set states it."""
    corners = points[face].astype(np.float64)
    c = corners.mean(axis=0)
    return 0.5 * sum(
        np.cross(corners[i] - c, corners[(i + 1) % len(face)] - c) for i in range(len(face))
    )


@pytest.mark.parametrize("mesh", [cube(), tube(9, 7)], ids=["cube", "tube"])
def test_area_vectors_and_centres_match_the_stated_formula(mesh):
    found = measure(surface(mesh))
    expected = np.array([area_by_loop(mesh.points, f) for f in mesh.faces])
    # float64 sums of a handful of products of order one
    np.testing.assert_allclose(found.area_vector, expected, atol=1e-14)
    centres = np.array([mesh.points[f].astype(np.float64).mean(axis=0) for f in mesh.faces])
    np.testing.assert_allclose(found.centre + found.offset, centres, atol=1e-14)


def test_warped_polygons_of_any_size_have_their_exact_area_vector():
    rng = np.random.default_rng(0)
    points = rng.normal(size=(60, 3))
    faces = [list(rng.choice(60, size=k, replace=False)) for k in (3, 4, 5, 6, 7, 11, 20)]
    found = measure(surface(Polygons(points, faces)))
    expected = np.array([area_by_loop(points, f) for f in faces])
    np.testing.assert_allclose(found.area_vector, expected, atol=1e-13)


def test_closed_cube_has_no_force_under_constant_pressure_and_minus_its_volume_under_p_x():
    found = measure(surface(cube(scale=2.0, shift=3.0)))
    assert found.closed
    assert found.volume == pytest.approx(8.0, abs=1e-13)
    force = -(7.0 * found.area_vector).sum(axis=0)
    np.testing.assert_allclose(force, 0.0, atol=1e-13)
    p = (found.centre + found.offset)[:, 0]
    np.testing.assert_allclose(
        -(p[:, None] * found.area_vector).sum(axis=0), [-8, 0, 0], atol=1e-13
    )


def test_winding_shows_in_the_sign_of_the_volume():
    assert measure(surface(cube(outward=True))).volume > 0
    assert measure(surface(cube(outward=False))).volume < 0


def test_a_flipped_cell_is_told_from_an_open_surface():
    whole, flipped, opened = tube(9, 7), tube(9, 7), tube(9, 7)
    flipped.faces[5] = flipped.faces[5][::-1]
    del opened.faces[5]
    assert measure(surface(whole)).closed
    assert edge_report(surface(whole)) == (True, True)
    assert not measure(surface(flipped)).closed
    assert edge_report(surface(flipped)) == (True, False)
    assert not measure(surface(opened)).closed
    assert edge_report(surface(opened))[0] is False


def test_degenerate_cells_and_cells_without_an_area_keep_their_row():
    points = np.array([[0, 0, 0], [1, 0, 0], [2, 0, 0], [0, 1, 0], [0.1, 0.1, 0.1]], np.float32)
    cells = [[4], [0, 1], [0, 1, 2], [1, 1, 1], [0, 1, 3]]
    kinds = np.array([VERTEX, VERTEX, 1, 1, 1], np.uint8)
    mesh = surface(Polygons(points, cells))
    mesh.kinds = kinds
    found = measure(mesh)
    assert found.num_degenerate == 2
    np.testing.assert_array_equal(found.area_vector[:4], 0.0)
    np.testing.assert_allclose(found.area_vector[4], [0, 0, 0.5])
    np.testing.assert_allclose((found.centre + found.offset)[1], [0.5, 0, 0])
    normal, size = unit_normals(found.area_vector, found.centre)
    np.testing.assert_allclose(np.linalg.norm(normal, axis=1), 1.0, atol=1e-6)
    np.testing.assert_array_equal(size[:4], 0.0)


@pytest.mark.parametrize("shift", [0.0, 1e5], ids=["near", "far"])
def test_collinear_corners_are_degenerate_wherever_the_mesh_stands(shift):
    base = np.array([0.1, 0.7, 0.3])
    step = np.array([0.3, 0.11, 0.07])
    points = np.stack([base, base + step, base + 2.5 * step, [0.1, 0.7, 1.3]]) + shift
    found = measure(surface(Polygons(points, [[0, 1, 2], [0, 1, 3]])))
    sizes = np.linalg.norm(found.area_vector, axis=1)
    # 1e5 m away float64 has 1e-11 m left: the area of the first is rounding, far below the second
    assert sizes[0] < 1e-10
    assert sizes[1] > 0.1


def test_strips_have_the_area_of_their_triangles():
    points = np.array([[0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 1, 0], [2, 0, 1]], float)
    strip = Surface(points, np.arange(5), np.array([0, 5]), np.array([STRIP], np.uint8))
    triangles = Polygons(points, [[0, 1, 2], [2, 1, 3], [2, 3, 4]])
    expected = measure(surface(triangles)).area_vector.sum(axis=0)
    np.testing.assert_allclose(measure(strip).area_vector[0], expected, atol=1e-15)


def test_dual_areas_are_shares_of_the_cells_around_a_point():
    mesh = tube(9, 7)
    cells = measure(surface(mesh)).area_vector
    vectors, areas = dual_areas(surface(mesh), cells)
    for point in (0, 5, 40):
        around = [i for i, f in enumerate(mesh.faces) if point in f]
        share = [cells[i] / len(mesh.faces[i]) for i in around]
        np.testing.assert_allclose(vectors[point], sum(share), atol=1e-15)
        assert areas[point] == pytest.approx(sum(np.linalg.norm(s) for s in share), abs=1e-15)
    np.testing.assert_allclose(vectors.sum(axis=0), cells.sum(axis=0), atol=1e-13)
    assert areas.sum() == pytest.approx(np.linalg.norm(cells, axis=1).sum(), rel=1e-13)
    assert (areas > np.linalg.norm(vectors, axis=1)).all()  # the surface is curved everywhere


def test_averages_to_cells_are_means_of_the_corners():
    mesh = tube(9, 7)
    values = np.random.default_rng(0).normal(size=(len(mesh.points), 3))
    expected = [values[f].mean(axis=0) for f in mesh.faces]
    np.testing.assert_allclose(average_to_cells(surface(mesh), values), expected, atol=1e-14)


def test_more_cells_than_a_block_and_any_number_of_threads_change_nothing():
    n = 200  # more cells than BLOCK
    mesh = tube(n, n)
    assert len(mesh.faces) > BLOCK
    one, two = measure(surface(mesh)), measure(surface(mesh), threads=2)
    np.testing.assert_array_equal(one.area_vector, two.area_vector)
    np.testing.assert_array_equal(one.centre, two.centre)
    assert (one.volume, one.residual) == (two.volume, two.residual)
    for cell in (0, BLOCK - 1, BLOCK, len(mesh.faces) - 1):
        np.testing.assert_allclose(
            one.area_vector[cell], area_by_loop(mesh.points, mesh.faces[cell]), atol=1e-15
        )


def test_a_mesh_far_from_the_origin_has_the_same_geometry():
    near, far = measure(surface(cube())), measure(surface(cube(shift=1e5)))
    # coordinates of 1e5 with 16 digits leave 1e-11
    np.testing.assert_allclose(far.centre, near.centre, atol=1e-10)
    np.testing.assert_allclose(far.area_vector, near.area_vector, atol=1e-10)
    np.testing.assert_allclose(far.offset, 1e5 + near.offset, atol=1e-10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.connectivity.__setitem__(3, 99), "names points 0 to 99"),
        (lambda m: m.connectivity.__setitem__(3, -1), "names points -1"),
        (lambda m: m.offsets.__setitem__(2, 1), "offsets decrease at cell 1"),
        (lambda m: m.offsets.__setitem__(-1, 5), "offsets run from 0 to 5"),
        (lambda m: m.points.__setitem__((4, 1), np.nan), "point 4 is"),
    ],
    ids=["beyond", "negative", "order", "length", "nan"],
)
def test_damaged_meshes_are_refused(change, message):
    mesh = surface(cube())
    change(mesh)
    with pytest.raises(DataError, match=message):
        mesh.check("file.vtp")


def test_meshes_without_polygons_are_refused():
    points = np.zeros((3, 3))
    with pytest.raises(DataError, match=r"has no cells \(it has 3 points\)"):
        Surface(points, np.empty(0, int), np.zeros(1, int)).check("file.vtp")
    lines = Surface(points, np.arange(2), np.array([0, 2]), np.array([VERTEX], np.uint8))
    with pytest.raises(DataError, match="no polygons"):
        lines.check("file.vtp")
