"""Metrics: against their definitions, over chunks and ranks, and their refusals."""

from __future__ import annotations

import numpy as np
import pytest

from cpflare.errors import DataError, NonFiniteError
from cpflare.evaluate.metrics import (
    METRICS,
    FieldSums,
    evaluate_case,
    mean_over_cases,
    r2_score,
)

FIELDS = ("pressure", "wall_shear")


@pytest.fixture
def case():
    rng = np.random.default_rng(0)
    truth = {
        "pressure": rng.normal(-230, 270, 1001).astype(np.float32),
        "wall_shear": rng.normal(-1, 2, (1001, 3)).astype(np.float32),
    }
    predictions = {
        name: (values + rng.normal(0, 1, values.shape)).astype(np.float32)
        for name, values in truth.items()
    }
    return predictions, truth, rng.uniform(1e-6, 1e-3, 1001)


def test_every_metric_equals_its_definition(case):
    predictions, truth, area = case
    found = evaluate_case("run_1", predictions, truth, area, chunk_rows=100)
    assert tuple(found) == FIELDS
    for name in FIELDS:
        difference = predictions[name].astype(np.float64) - truth[name].astype(np.float64)
        error = np.linalg.norm(difference.reshape(1001, -1), axis=1)
        norm = np.linalg.norm(truth[name].astype(np.float64).reshape(1001, -1), axis=1)
        expected = {
            "rel_l2": np.sqrt((error**2).sum() / (norm**2).sum()),
            "rel_l2_area": np.sqrt((area * error**2).sum() / (area * norm**2).sum()),
            "mae": error.mean(),
            "rmse": np.sqrt((error**2).mean()),
            "mae_area": np.average(error, weights=area),
            "rmse_area": np.sqrt(np.average(error**2, weights=area)),
        }
        assert tuple(found[name]) == tuple(METRICS)
        # The two differ only in the order of float64 sums of a thousand terms.
        assert found[name] == pytest.approx(expected, rel=1e-13)


def test_the_sums_of_ranks_add_through_a_flat_vector(case):
    predictions, truth, area = case
    whole = FieldSums(FIELDS)
    whole.add(predictions, truth, area)
    vectors = []
    for rows in (slice(0, 400), slice(400, 400), slice(400, 1001)):  # one rank has no cells
        part = FieldSums(FIELDS)
        part.add(
            {name: predictions[name][rows] for name in FIELDS},
            {name: truth[name][rows] for name in FIELDS},
            area[rows],
        )
        vectors.append(part.to_vector())
    joined = FieldSums.from_vector(FIELDS, np.sum(vectors, axis=0))
    merged = FieldSums(FIELDS)
    for vector in vectors:
        merged.merge(FieldSums.from_vector(FIELDS, vector))
    for sums in (joined, merged):
        for name in FIELDS:
            assert sums.metrics("a")[name] == pytest.approx(whole.metrics("a")[name], rel=1e-13)


def test_a_ratio_of_sums_is_not_a_mean_of_ratios():
    truth = {"pressure": np.array([1.0, 100.0])}
    predictions = {"pressure": np.array([2.0, 100.0])}
    found = evaluate_case("a", predictions, truth, np.ones(2), chunk_rows=1)
    assert found["pressure"]["rel_l2"] == pytest.approx(1 / np.sqrt(10001), rel=1e-14)


def test_area_weights_count_only_where_they_should():
    truth = {"pressure": np.array([1.0, 1.0])}
    predictions = {"pressure": np.array([1.0, 2.0])}  # the wrong cell has no area
    found = evaluate_case("a", predictions, truth, np.array([1.0, 0.0]))["pressure"]
    assert found["rel_l2_area"] == found["mae_area"] == found["rmse_area"] == 0.0
    assert found["mae"] == 0.5


@pytest.mark.slow
def test_sums_are_float64_even_for_float32_fields():
    # 2²⁵ equal float32 terms: a float32 running sum stops at 2²⁴.
    sums = FieldSums(("pressure",))
    ones = np.ones(1 << 20, dtype=np.float32)
    for _ in range(32):
        sums.add({"pressure": ones * 2}, {"pressure": ones}, ones)
    assert sums.metrics("a")["pressure"]["rmse"] == 1.0
    assert sums.sums[0, 0] == 1 << 25


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_prediction_that_is_not_finite_is_an_error_on_every_rank(case, value):
    predictions, truth, area = case
    predictions["wall_shear"][7, 1] = value
    bad, good = FieldSums(FIELDS), FieldSums(FIELDS)
    bad.add(predictions, truth, area)
    good.add(truth, truth, area)
    summed = FieldSums.from_vector(FIELDS, bad.to_vector() + good.to_vector())
    with pytest.raises(NonFiniteError, match=r"'run_3', field 'wall_shear': 1 of 2002 predictions"):
        summed.metrics("run_3")


def test_a_truth_that_is_not_finite_is_an_error(case):
    predictions, truth, area = case
    truth["pressure"][3] = np.nan
    with pytest.raises(DataError, match=r"'run_3', field 'pressure': 1 of 1001 true values"):
        evaluate_case("run_3", predictions, truth, area)


@pytest.mark.parametrize(
    ("true", "area", "word"),
    [
        (np.zeros(4), np.ones(4), "squared norm"),
        (np.ones(4), np.zeros(4), "area-weighted"),
        (np.array([0.0, 0.0, 1.0, 0.0]), np.array([1.0, 1.0, 0.0, 1.0]), "area-weighted"),
        (np.ones(4), np.full(4, np.nan), "area-weighted"),
        (np.full(4, 1e200), np.ones(4), "squared norm"),
    ],
)
def test_a_denominator_of_zero_or_infinity_is_an_error(true, area, word):
    with pytest.raises(DataError, match=rf"'run_3', field 'pressure': .*{word}"):
        evaluate_case("run_3", {"pressure": np.ones(4)}, {"pressure": true}, area)


def test_a_case_without_cells_is_an_error():
    empty = np.zeros(0)
    with pytest.raises(DataError, match="case 'run_3', field 'pressure': no cells"):
        evaluate_case("run_3", {"pressure": empty}, {"pressure": empty}, empty)


def test_wrong_lengths_and_missing_fields_are_errors(case):
    predictions, truth, area = case
    with pytest.raises(DataError, match="'pressure': 1000 predictions, 1001 true values"):
        evaluate_case("a", {"pressure": predictions["pressure"][:-1]}, truth, area)
    with pytest.raises(DataError, match="'wall_shear': None predictions"):
        evaluate_case("a", {"pressure": truth["pressure"]}, truth, area, fields=FIELDS)
    with pytest.raises(DataError, match=r"'wall_shear'.*differ in shape"):
        FieldSums(("wall_shear",)).add({"wall_shear": area}, truth, area)
    with pytest.raises(DataError, match="truth has no field 'wall_shear'"):
        FieldSums(("wall_shear",)).add(predictions, {}, area)


def test_the_mean_over_cases_is_plain():
    table = [{"pressure": {"rel_l2": 0.1}}, {"pressure": {"rel_l2": 0.4}}]
    assert mean_over_cases(table) == {"pressure": {"rel_l2": pytest.approx(0.25)}}


def test_r2_is_one_for_a_perfect_prediction_and_zero_for_the_mean():
    assert r2_score([1, 2, 4], [1, 2, 4]) == 1.0
    assert r2_score([2, 2, 2], [1, 2, 3]) == 0.0
    assert r2_score([1, 2], [3, 3]) is None
