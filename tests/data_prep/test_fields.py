"""Field maps: those that come with cpflare, round trips, and refusals."""

from __future__ import annotations

import numpy as np
import pytest

from cpflare.errors import ConfigError
from data_prep.fields import FieldMap, known_maps, load_field_map

MINIMAL = {"name": "m", "association": "cell", "fields": {"pressure": {"names": ["p"]}}}


def test_the_stated_data_sets_have_maps():
    assert set(known_maps()) >= {
        "ahmedml",
        "ahmedml_mapped",
        "drivaerml",
        "drivaernet_plus_plus",
        "drivaerstar",
        "hiliftaeroml",
        "shapenet_car",
        "windsorml",
    }


@pytest.mark.parametrize("name", sorted(known_maps()))
def test_maps_come_back_from_their_dictionary(name):
    mapping = load_field_map(name)
    assert FieldMap.from_dict(mapping.to_dict()) == mapping


def test_drivaerml_states_what_the_release_states():
    mapping = load_field_map("drivaerml")
    assert mapping.association == "cell"
    assert mapping.fields["pressure"].names == ("pMeanTrim",)
    assert (mapping.shear_sign, mapping.winding) == (-1, "inward")
    assert mapping.reference.speed == 38.889
    assert mapping.reference.area == 2.17
    assert mapping.reference.centre == (1.40009, 0.0, -0.3176)


def test_axes_give_canonical_components():
    mapping = FieldMap.from_dict({**MINIMAL, "axes": ["x", "-z", "y"]})
    np.testing.assert_array_equal(mapping.rotation @ [1, 2, 3], [1, -3, 2])
    assert np.linalg.det(mapping.rotation) == pytest.approx(1.0)


def test_a_map_is_read_from_a_file_and_called_by_it(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("association: point\nfields: {pressure: {names: p, scale: 2}}\n")
    mapping = load_field_map(path)
    assert (mapping.name, mapping.stored_association) == ("mine", "point")
    assert mapping.fields["pressure"].scale == 2.0
    path.write_text("association: point\nstore_as: cell\nfields: {pressure: {names: p}}\n")
    assert load_field_map(path).stored_association == "cell"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"association": "cells"}, "association=cells; it must be cell or point"),
        ({"association": None}, "association=None"),
        ({"asociation": "cell"}, "unknown key asociation; did you mean association"),
        ({"fields": {}}, "fields="),
        ({"fields": {"presure": {"names": ["p"]}}}, "fields=presure"),
        ({"fields": {"pressure": {"name": ["p"]}}}, "did you mean fields.pressure.names"),
        ({"fields": {"pressure": {"names": ["p"], "scale": 0}}}, "scale=0"),
        ({"fields": {"pressure": {"names": ["p"], "scale": "a"}}}, "scale=a; it must be a number"),
        ({"fields": {"wall_shear": {"components": ["a", "b"]}}}, "3 names"),
        ({"fields": {"pressure": {}}}, "given `names`"),
        ({"shear_sign": 2}, "shear_sign=2"),
        ({"winding": "out"}, "winding=out"),
        ({"axes": ["x", "y", "y"]}, "x, y and z once each"),
        ({"axes": ["-x", "y", "z"]}, "mirror image"),
        ({"store_as": "point"}, "store_as=point"),
        ({"reference": {"area": -1}}, "reference.area=-1"),
        ({"reference": {"centre": [0, 0]}}, "three numbers"),
        ({"length_scale": 0}, "length_scale=0"),
    ],
)
def test_wrong_keys_and_values_are_named(change, message):
    with pytest.raises(ConfigError, match=message):
        FieldMap.from_dict({**MINIMAL, **change})


def test_unknown_maps_and_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match="did you mean drivaerml"):
        load_field_map("drivaerm")
    with pytest.raises(ConfigError, match="does not exist"):
        load_field_map(tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("association: [cell\n")
    with pytest.raises(ConfigError, match=r"broken\.yaml"):
        load_field_map(broken)
    broken.write_text("- a\n- b\n")
    with pytest.raises(ConfigError, match="holds a list"):
        load_field_map(broken)
