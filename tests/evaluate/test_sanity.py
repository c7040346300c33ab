"""What is odd about a surface that is predicted: each has one notice, and an ordinary one none."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cpflare.data.normalize import Normalizer
from cpflare.evaluate.metrics import FieldSums, r2_score
from cpflare.evaluate.sanity import Trained, half_of
from support.stores import ring_mesh

LOW, HIGH = np.array([-0.9, -1.0, 0.0]), np.array([4.1, 1.0, 1.4])
ROWS = 10_000


@pytest.fixture
def trained():
    return Trained(LOW, HIGH, HIGH - LOW, (8_000, 12_000), relative=False)


def test_an_ordinary_surface_has_no_notice(trained):
    assert trained.remarks(LOW + 0.1, HIGH - 0.2, ROWS) == []
    assert trained.remarks(0.8 * LOW, 0.8 * HIGH, 3 * ROWS) == []


@pytest.mark.parametrize(
    ("factor", "text"),
    [
        (1000, r"1000 times .*in millimetres.*--length-scale 0\.001 .*length_scale"),
        (25.4, r"25\.4 times .*--length-scale 0\.03937"),
        (39.37, r"39\.37 times .*in inches"),
        (0.001, r"0\.001 times .*--length-scale 1000"),
    ],
)
def test_another_unit_is_told_with_its_factor(trained, factor, text):
    (remark,) = trained.remarks(0.95 * factor * LOW, 0.95 * factor * HIGH, ROWS)
    assert re.search(text, remark)


def test_a_surface_elsewhere_is_told_unless_place_does_not_matter(trained):
    away = np.array([100.0, 0, 0])
    (remark,) = trained.remarks(LOW + away, HIGH + away, ROWS)
    assert "its x is 99.1 to 104.1 m" in remark
    relative = Trained(LOW, HIGH, HIGH - LOW, None, relative=True)
    assert relative.remarks(LOW + away, HIGH + away, ROWS) == []


def test_exchanged_axes_are_told(trained):
    turned = [0, 2, 1]
    (remark,) = trained.remarks(LOW[turned], HIGH[turned], ROWS)
    assert "axes may have been exchanged" in remark


@pytest.mark.parametrize(("rows", "kind"), [(1000, "coarser"), (100_000, "finer")])
def test_a_mesh_of_another_fineness_is_told(trained, rows, kind):
    (remark,) = trained.remarks(LOW, HIGH, rows)
    assert f"far {kind}" in remark


def sum_of_areas(points, faces):
    total = np.zeros(3)
    for face in faces:
        corners = points[face]
        for k in range(1, len(face) - 1):
            total += np.cross(corners[k] - corners[0], corners[k + 1] - corners[0]) / 2
    return -total  # outward


def test_a_half_model_is_known_by_its_plane():
    points, faces = ring_mesh(24, 11, centre=(0, 0, 0))
    points = np.asarray(points)
    box = points.min(axis=0), points.max(axis=0)
    assert half_of(sum_of_areas(points, faces), *box) is None
    for side, place in ((1, "y = 0 m"), (-1, "y = 0 m")):
        flat = points.copy()
        flat[:, 1] = side * np.maximum(side * flat[:, 1], 0)
        kept = [face for face in faces if np.ptp(flat[face, 1]) or flat[face[0], 1]]
        used = flat[sorted({corner for face in kept for corner in face})]
        remark = half_of(sum_of_areas(flat, kept), used.min(axis=0), used.max(axis=0))
        assert place in remark.replace("-0", "0")
    # A small hole is none: a wheel that was left out, say.
    assert half_of(sum_of_areas(points, faces[:-2]), *box) is None


def test_the_training_is_described_by_its_run():
    statistics = {
        "position": {"min": LOW, "max": HIGH},
        "position_relative": {"min": LOW - 1, "max": HIGH - 1},
    }
    normal = Normalizer(("position",), (), True, *(np.zeros(3) for _ in range(4)))
    found = Trained.of({"statistics": statistics, "train_rows": [5, 9]}, normal)
    assert found.rows == (5, 9)
    assert found.relative
    assert np.allclose(found.extent, HIGH - LOW)
    assert Trained.of({"statistics": statistics}, normal).rows is None


def test_a_constant_does_not_make_the_error_relative_to_the_deviation_smaller():
    rng = np.random.default_rng(0)
    truth, error = rng.normal(0, 100, (500, 3)), rng.normal(0, 50, (500, 3))
    found = []
    for constant in (0.0, 101_325.0):
        sums = FieldSums(("p",))
        for rows in (slice(0, 200), slice(200, None)):
            true = truth[rows] + constant
            sums.add({"p": true + error[rows]}, {"p": true}, np.ones(len(true)))
        found.append((sums.metrics("x")["p"]["rel_l2"], sums.relative_to_deviation()["p"]))
    expected = np.sqrt((error**2).sum() / ((truth - truth.mean(axis=0)) ** 2).sum())
    assert [dev for _, dev in found] == pytest.approx([expected, expected], rel=1e-9)
    assert found[1][0] < 1e-3 < found[0][0]


def test_r2_of_what_hardly_varies_is_left_out():
    true, pred = [1e-5, -1e-5, 2e-5], [1e-3, -2e-3, 1e-3]
    assert r2_score(pred, true) < -1000
    assert r2_score(pred, true, least=2e-3 * 0.3) is None
