"""Errors by frame: against NumPy, over chunks and ranks, horizons, and what diverges."""

from __future__ import annotations

import numpy as np
import pytest

from cpflare.errors import ConfigError, DataError
from cpflare.evaluate.frame_sums import (
    VRMSE_EPS,
    FrameSums,
    horizon,
    horizons,
    mean_over_windows,
)

FRAMES, ROWS, CHANNELS = 6, 101, 2


def draw(seed=0):
    rng = np.random.default_rng(seed)
    truth = rng.normal([5.0, -2.0], [1.0, 30.0], (FRAMES, ROWS, CHANNELS))
    predicted = truth + rng.normal(size=truth.shape)
    return predicted.astype(np.float32), truth.astype(np.float32), rng.uniform(0.1, 3, ROWS)


def summed(predicted, truth, weight, *, rows=40, frames=4, mean=(5.0, -2.0)):
    sums = FrameSums.empty("u", frames=len(truth), mean=np.array(mean))
    for first in range(0, len(truth), frames):
        for start in range(0, len(weight), rows):
            part = np.s_[first : first + frames, start : start + rows]
            sums.add(predicted[part], truth[part], weight[start : start + rows], first)
    return sums


def test_every_error_equals_its_definition_over_any_chunks():
    predicted, truth, weight = draw()
    y, t = predicted.astype(np.float64), truth.astype(np.float64)
    e = y - t
    part = horizon("2-5")
    w = np.broadcast_to(weight[:, None], t.shape)
    mean = np.average(t, axis=1, weights=w)[:, None]
    variance = np.average((t - mean) ** 2, axis=1, weights=w)
    square = np.average(e**2, axis=1, weights=w)
    vrmse = np.sqrt(square / (variance + VRMSE_EPS))
    by_frame = np.linalg.norm(e, axis=(1, 2)) / np.linalg.norm(t, axis=(1, 2))
    weighted = np.sqrt((w * e**2)[1:5].sum() / (w * t**2)[1:5].sum())
    for rows, frames in ((40, 4), (1000, 6), (1, 1)):
        sums = summed(predicted, truth, weight, rows=rows, frames=frames)
        found = {
            "rel_l2": sums.rel_l2(part),
            "rel_l2_w": sums.rel_l2(part, weighted=True),
            "rel_l2_mean": sums.rel_l2_mean(part),
            "rmse": sums.rmse(part),
            "mae": sums.mae(part),
            "vrmse": sums.vrmse(part),
        }
        assert found == pytest.approx(
            {
                "rel_l2": np.linalg.norm(e[1:5]) / np.linalg.norm(t[1:5]),
                "rel_l2_w": weighted,
                "rel_l2_mean": by_frame[1:5].mean(),
                "rmse": np.sqrt((e[1:5] ** 2).sum(axis=-1).mean()),
                "mae": np.abs(e[1:5]).mean(),
                "vrmse": vrmse[1:5].mean(),
            },
            rel=1e-12,
        )
        assert sums.vrmse_frames() == pytest.approx(vrmse, rel=1e-12)
        channels = np.linalg.norm(e[1:5], axis=(0, 1)) / np.linalg.norm(t[1:5], axis=(0, 1))
        assert sums.rel_l2_channels(part) == pytest.approx(channels, rel=1e-12)
    # They are different numbers, so that none stands for another.
    assert len({round(value, 6) for value in found.values()}) == len(found)


def test_the_sums_of_ranks_add_through_a_flat_vector():
    predicted, truth, weight = draw()
    whole = summed(predicted, truth, weight)
    vectors = []
    for rows in (slice(0, 60), slice(60, 60), slice(60, ROWS)):  # one rank has none
        sums = FrameSums.empty("u", frames=FRAMES, mean=np.array([5.0, -2.0]))
        sums.add(predicted[:, rows], truth[:, rows], weight[rows])
        vectors.append(sums.to_vector())
    together = whole.from_vector(sum(vectors))
    assert together.vrmse() == pytest.approx(whole.vrmse(), rel=1e-13)
    merged = FrameSums.empty("u", frames=FRAMES, mean=np.array([5.0, -2.0]))
    for vector in vectors:
        merged.merge(whole.from_vector(vector))
    assert merged.rel_l2() == together.rel_l2()


def test_a_large_mean_does_not_cancel():
    rng = np.random.default_rng(0)
    truth = 1e6 + rng.normal(size=(1, 500, 1))
    sums = summed(truth + 0.1, truth, np.ones(500), mean=(1e6,))
    assert sums.variance()[0, 0] == pytest.approx(truth.var(), rel=1e-9)
    assert sums.vrmse() == pytest.approx(0.1 / np.sqrt(truth.var() + VRMSE_EPS), rel=1e-9)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_diverges_is_infinite_from_there_and_in_every_mean(bad):
    predicted, truth, weight = draw()
    predicted[3, 7, 1] = bad
    sums = summed(predicted, truth, weight)
    assert sums.diverged_at() == 4
    assert sums.vrmse(horizon("4")) == sums.rel_l2(horizon("1-6")) == np.inf
    assert np.isfinite(sums.vrmse(horizon("1-3")))
    fine = summed(*draw(1))
    assert fine.diverged_at() is None
    mean = mean_over_windows([sums.vrmse_frames(), fine.vrmse_frames()])
    assert np.isinf(mean[3, 1])
    assert np.isfinite(mean[:3]).all()


def test_a_truth_of_zeros_has_a_vrmse_but_no_relative_error():
    predicted, truth, weight = draw()
    truth[0] = 0.0
    sums = summed(predicted, truth, weight)
    with pytest.raises(DataError, match=r"field 'u'.* in frames 1 to 1 is 0\.0, .* data\.frames"):
        sums.rel_l2(horizon("1"))
    with pytest.raises(DataError, match="frames 1 to 1"):
        sums.rel_l2_mean()
    assert np.isfinite(sums.rel_l2())
    least = np.sqrt(np.average(predicted[0].astype(np.float64) ** 2, axis=0, weights=weight))
    assert sums.vrmse_frames()[0] == pytest.approx(least / np.sqrt(VRMSE_EPS), rel=1e-12)
    assert sums.low_variances() == 2
    assert sums.low_variances(horizon("2-6")) == 0


def test_no_rows_and_wrong_shapes_are_refused():
    predicted, truth, weight = draw()
    sums = FrameSums.empty("u", frames=FRAMES, mean=np.zeros(2))
    with pytest.raises(DataError, match="no rows were evaluated"):
        sums.vrmse()
    for arguments in (
        (predicted, truth[:, :50], weight),
        (predicted, truth, weight[:50]),
        (predicted[..., :1], truth[..., :1], weight),
        (predicted, truth, weight, 1),
    ):
        with pytest.raises(DataError, match="do not fit 6 frames of 2 channels"):
            sums.add(*arguments)


def test_horizons_count_from_one_with_both_ends():
    assert horizons("1, 1-20,21-60", 60) == {
        "1": slice(0, 1),
        "1-20": slice(0, 20),
        "21-60": slice(20, 60),
    }
    for text in ("", "0", "5-2", "a", "1-", "-3", "1.5"):
        with pytest.raises(ConfigError, match="no frame or range of frames"):
            horizon(text)
    with pytest.raises(ConfigError, match="21-60 ends beyond the rollout of 40 frames; set eval"):
        horizons("1,21-60", 40)
