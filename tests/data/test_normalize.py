"""Normalisation: the published scaling, its precision far from the origin, and its inverse."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import yaml

from cpflare.config import config_from_dict
from cpflare.data.normalize import Normalizer
from cpflare.data.store import Store
from data_prep.vtp_to_zarr import prepare
from support.stores import SPLITS, ring_mesh, write_mesh, write_store


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("normalize") / "store")


def normalizer(store, **data):
    return Normalizer.from_statistics(config_from_dict({"data": data}), store.statistics)


def training_rows(store, **read):
    """All fields of all training rows, one case after another."""
    parts = [store.case(name).read(**read) for name in SPLITS["train"]]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def encoded(store, scale, name, dtype=torch.float64):
    case = store.case(name)
    return scale.encode_inputs(case.read(centred=True), case.offset, dtype)


def test_position_is_scaled_over_the_training_split_and_the_normal_left_alone(store):
    scale = normalizer(store)
    inputs = torch.cat([encoded(store, scale, name) for name in SPLITS["train"]])
    rows = training_rows(store)
    low, high = rows["position"].min(axis=0), rows["position"].max(axis=0)
    # Some roundings of fp64 at unit scale.
    assert np.allclose(inputs[:, :3], (rows["position"] - low) / (high - low), rtol=0, atol=1e-14)
    assert torch.allclose(inputs[:, :3].min(dim=0).values, torch.zeros(3).double(), atol=1e-14)
    assert torch.allclose(inputs[:, :3].max(dim=0).values, torch.ones(3).double(), atol=1e-14)
    assert np.array_equal(inputs[:, 3:], rows["normal"].astype(np.float64))


def test_held_out_cases_do_not_move_the_scaling(store, tmp_path):
    def spread(name, fields):
        if name not in SPLITS["train"]:
            fields["position"] *= 3
            fields["pressure"] -= 1000

    other = write_store(tmp_path / "store", change=spread)
    assert other.identity != store.identity
    assert normalizer(other).to_dict() == normalizer(store).to_dict()


def test_targets_are_standardised_over_the_training_split(store):
    scale, rows = normalizer(store), training_rows(store)
    targets = scale.encode_targets(rows, torch.float64)
    assert targets.shape == (len(rows["pressure"]), 4)
    # Means of 400 unit values, summed in fp64 by two different routes.
    assert torch.allclose(targets.mean(dim=0), torch.zeros(4).double(), atol=1e-12)
    assert torch.allclose(targets.std(dim=0, correction=0), torch.ones(4).double(), rtol=1e-12)
    pressure = rows["pressure"].astype(np.float64)
    expected = (pressure - pressure.mean()) / pressure.std()
    assert np.allclose(targets[:, 0], expected, rtol=0, atol=1e-12)


def test_fp64_casts_the_stored_float32_before_it_normalises(store):
    rows = store.case("run_1").read(centred=True)
    assert rows["position"].dtype == rows["pressure"].dtype == np.float32
    in_double = {name: values.astype(np.float64) for name, values in rows.items()}
    scale, offset = normalizer(store), store.case("run_1").offset
    for encode in (
        lambda fields: scale.encode_inputs(fields, offset, torch.float64),
        lambda fields: scale.encode_targets(fields, torch.float64),
    ):
        found = encode(rows)
        assert found.dtype == torch.float64
        assert torch.equal(found, encode(in_double))
        # Had it gone through float32, rounding it there again would change nothing.
        assert not torch.equal(found, found.float().double())


def test_fp32_is_fp64_to_its_rounding(store):
    scale, case = normalizer(store), store.case("run_1")
    rows = case.read(centred=True)
    single = scale.encode_inputs(rows, case.offset, torch.float32)
    assert single.dtype == torch.float32
    # Two float32 roundings of values up to 1: 2 × 6e-8.
    assert torch.allclose(
        single.double(), scale.encode_inputs(rows, case.offset, torch.float64), rtol=0, atol=2e-7
    )


def test_relative_position_is_minus_the_bounding_box_s_centre(store):
    scale = normalizer(store, position="relative")
    rows = training_rows(store, centred=True)["position"].astype(np.float64)
    low, high = rows.min(axis=0), rows.max(axis=0)
    inputs = torch.cat([encoded(store, scale, name) for name in SPLITS["train"]])
    assert np.allclose(inputs[:, :3], (rows - low) / (high - low), rtol=0, atol=1e-14)
    absolute = torch.cat([encoded(store, normalizer(store), name) for name in SPLITS["train"]])
    assert not torch.allclose(inputs, absolute, atol=1e-3)


MOVE = np.array([1e5, -2e5, 3e5])


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    """One body as a float64 mesh, where it was (run_1) and 1e5 m away (run_2); a store each."""
    folder = tmp_path_factory.mktemp("moved")
    points, faces = ring_mesh(11, 10)
    stores = {}
    for name, shift in (("run_1", 0 * MOVE), ("run_2", MOVE)):
        path = write_mesh(folder / name / "boundary.vtp", points + shift, faces, dtype=np.float64)
        prepare([path], folder / f"{name}.zarr", seed=0)
        stores[name] = Store.open(folder / f"{name}.zarr")
    return stores


def in_source_order(store, scale, name, dtype):
    inputs = encoded(store, scale, name, dtype)
    return inputs[np.argsort(store.case(name).read(fields=["cell_id"])["cell_id"])]


# Both cases store centred float32 positions up to 2 m: an error of 1.2e-7 m over a length of 4 m.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_mesh_moved_far_away_gives_the_same_relative_inputs(moved, dtype):
    scale = normalizer(moved["run_1"], position="relative")
    here = in_source_order(moved["run_1"], scale, "run_1", dtype)
    there = in_source_order(moved["run_2"], scale, "run_2", dtype)
    assert (here - there).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_data_set_far_from_the_origin_loses_no_digits_in_absolute_position(moved, dtype):
    here, there = (
        in_source_order(store, normalizer(store), name, dtype) for name, store in moved.items()
    )
    # In float32, 1e5 m alone would be rounded to 0.004 m: an error of 1e-3 after scaling.
    assert (here - there).abs().max() < 1e-6


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_targets_come_back(store, dtype, tolerance):
    scale, rows = normalizer(store), training_rows(store)
    decoded = scale.decode_targets(scale.encode_targets(rows, dtype))
    assert list(decoded) == ["pressure", "wall_shear"]
    for name, values in decoded.items():
        assert values.shape == rows[name].shape
        assert values.dtype == (np.float64 if dtype == torch.float64 else np.float32)
        # Relative to the field's size: a few roundings of the dtype.
        assert np.abs(values - rows[name]).max() < tolerance * np.abs(rows[name]).max()


def test_half_precision_outputs_are_widened_before_they_get_units(store):
    outputs = torch.randn(50, 4).bfloat16()
    decoded = normalizer(store).decode_targets(outputs)
    assert decoded["pressure"].dtype == np.float32
    expected = normalizer(store).decode_targets(outputs.float())
    assert np.array_equal(decoded["wall_shear"], expected["wall_shear"])


def test_channels_stand_in_the_order_of_the_configuration(store):
    swapped = normalizer(store, inputs=["normal", "position"], targets=["wall_shear", "pressure"])
    plain, case = normalizer(store), store.case("run_1")
    rows = case.read(centred=True)
    inputs = [s.encode_inputs(rows, case.offset, torch.float64) for s in (swapped, plain)]
    assert torch.equal(inputs[0][:, [3, 4, 5, 0, 1, 2]], inputs[1])
    targets = [s.encode_targets(rows, torch.float64) for s in (swapped, plain)]
    assert torch.equal(targets[0][:, [3, 0, 1, 2]], targets[1])
    back = swapped.decode_targets(targets[0])
    assert np.allclose(back["pressure"], rows["pressure"], rtol=1e-12)


def test_constant_channels_stay_finite(tmp_path):
    def flatten(name, fields):
        fields["position"][:, 1] = 0.25
        fields["pressure"][:] = -3.0
        fields["wall_shear"][:, 2] = 0.0

    store = write_store(tmp_path / "store", change=flatten)
    scale, case = normalizer(store), store.case("run_1")
    inputs = encoded(store, scale, "run_1")
    targets = scale.encode_targets(case.read(centred=True), torch.float64)
    assert torch.isfinite(inputs).all()
    # A constant far from 0 must not be blown up by its float32 rounding.
    assert inputs.abs().max() < 2
    assert targets[:, [0, 3]].abs().max() < 1e-6
    decoded = scale.decode_targets(targets)
    assert np.allclose(decoded["pressure"], -3.0)


@pytest.mark.parametrize("way", ["json", "yaml"])
@pytest.mark.parametrize("position", ["absolute", "relative"])
def test_it_survives_the_run_s_files_bitwise(store, way, position):
    scale = normalizer(store, position=position, targets=["wall_shear"])
    text = json.dumps(scale.to_dict()) if way == "json" else yaml.safe_dump(scale.to_dict())
    again = Normalizer.from_dict(json.loads(text) if way == "json" else yaml.safe_load(text))
    assert again.to_dict() == scale.to_dict()
    assert torch.equal(encoded(store, again, "run_1"), encoded(store, scale, "run_1"))
    rows = store.case("run_1").read(centred=True)
    assert torch.equal(
        again.encode_targets(rows, torch.float64), scale.encode_targets(rows, torch.float64)
    )
