"""The declaration of fields: channels, axes, and the way to canonical values and back."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import pytest

from cpflare.errors import DataError
from cpflare.evaluate.source_units import source_field
from cpflare.fields import FIELDS, INPUT_FIELDS, TARGET_FIELDS, Axes, SourceField, channels_of
from data_prep.fields import FieldSource, load_field_map
from data_prep.targets import choose

ALL_AXES = [
    [sign + letter for sign, letter in zip(signs, letters, strict=True)]
    for letters in permutations("xyz")
    for signs in product(("", "-"), repeat=3)
]


def test_channels_and_shapes_follow_from_the_kind():
    assert channels_of(INPUT_FIELDS) == 6
    assert channels_of(TARGET_FIELDS) == 4
    assert FIELDS["pressure"].shape(5) == (5,)
    assert FIELDS["wall_shear"].shape(5) == (5, 3)


@pytest.mark.parametrize("names", ALL_AXES, ids=",".join)
def test_axes_turn_as_their_matrix_and_back(names):
    axes, vectors = Axes.parse(names), np.random.default_rng(0).normal(size=(7, 3))
    turned = axes.to_canonical(vectors)
    np.testing.assert_array_equal(turned, vectors @ axes.matrix.T)
    np.testing.assert_array_equal(axes.to_source(turned), vectors)
    for i, name in enumerate(names):  # canonical component i is the named one of the source
        sign = -1 if name.startswith("-") else 1
        np.testing.assert_array_equal(turned[:, i], sign * vectors[:, "xyz".index(name[-1])])


@pytest.mark.parametrize(
    "names", [["x", "y", "y"], ["x", "y"], ["x", "y", "w"], ["x", "y", "z", "x"]]
)
def test_axes_that_are_none_are_refused(names):
    with pytest.raises(DataError, match="x, y and z once each"):
        Axes.parse(names)


@pytest.mark.parametrize("name", TARGET_FIELDS)
def test_the_way_to_canonical_values_is_undone(name):
    field = FIELDS[name]
    stored = SourceField(field, ("a",), 800.0, 25.0, Axes.parse(["x", "-z", "y"]))
    values = np.random.default_rng(0).normal(size=field.shape(9))
    np.testing.assert_allclose(stored.to_source(stored.to_canonical(values)), values, atol=1e-13)
    two = stored.to_canonical(values), stored.to_canonical(values[::-1])
    back = stored.to_source(two[0] - two[1], difference=True)
    np.testing.assert_allclose(back, values - values[::-1], atol=1e-13)


def test_a_scalar_is_not_turned_and_what_needs_no_change_is_the_same_array():
    values = np.arange(4, dtype=np.float32)
    turned = SourceField(FIELDS["pressure"], axes=Axes.parse(["-x", "-y", "z"]))
    assert turned.to_canonical(values) is values
    assert turned.to_source(values) is values


@pytest.mark.parametrize(
    "present", [["p"], ["q", "p"], ["c", "b", "a", "p"], ["a", "b", "q"], ["a", "b", "c"]]
)
def test_prediction_names_the_arrays_that_preparation_reads(tmp_path, present):
    source = {"names": ["p", "q"], "components": ["a", "b", "c"]}
    field_map = load_field_map("drivaerml")
    field_map.fields["wall_shear"] = FieldSource(**source)
    read = choose(tmp_path / "a.vtp", field_map, "wall_shear", {"cell": present, "point": []})
    assert source_field(field_map.to_dict(), "wall_shear", present).names == read.names
