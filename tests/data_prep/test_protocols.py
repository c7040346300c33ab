"""Protocols of benchmarks on small files in the layout of each public set, and the known traps."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import scipy.io
import yaml

from cpflare.errors import ConfigError, DataError
from data_prep.physics import acoustics, darcy, elasticity, navier_stokes
from data_prep.physics.making import Request
from data_prep.protocol_data import Moments, moments, open_cases, verify_pins
from data_prep.protocols import Pin, Protocol, known_protocols, load_protocol


def small(name, sizes, cuts=None, rename=None):
    """A public protocol with other lengths of axes, cuts and names of files; all else stays."""
    data = copy.deepcopy(yaml.safe_load(known_protocols()[name].read_text()))
    for field in data["fields"].values():
        for source in filter(None, (field["source"], field.get("test"))):
            source["shape"] = [
                sizes.get(axis, n) for axis, n in zip(source["axes"], source["shape"], strict=True)
            ]
            for old, new in (rename or {}).items():
                files = source["files"]
                files = files if isinstance(files, list) else [files]
                source["files"] = [file.replace(old, new) for file in files]
    if cuts:
        data["cuts"] = {"train": cuts[0], "test": cuts[1]}
    return Protocol.from_dict({"name": name, **data})


def all_cases(protocol, folder, part):
    with open_cases(protocol, folder, part) as cases:
        return [cases.case(k) for k in range(len(cases))]


# -- what comes with cpflare -----------------------------------------------------------------------


@pytest.mark.parametrize("name", known_protocols())
def test_protocols_that_come_with_cpflare_are_whole(name):
    protocol = load_protocol(name)
    target = re.split(r"[/@]", protocol.metric)
    assert target[0] in ("rel_l2", "vrmse")
    assert name.endswith("_made") or protocol.published or protocol.remarks
    for entry in protocol.published:
        assert entry.source
    for recipe in protocol.recipes.values():
        assert set(protocol.normalisers()) == set(protocol.fields) >= set(recipe.normalise)


def test_published_cuts_and_figures_are_those_of_the_papers():
    def figure(name, model):
        return next(p.value for p in load_protocol(name).published if p.model == model)

    assert figure("darcy", "CANO") == 0.41
    assert figure("elasticity", "FLARE") == 0.339
    assert figure("navier_stokes", "Transolver") == 9.4
    sizes = {
        name: (load_protocol(name).cuts.train, load_protocol(name).cuts.test)
        for name in ("elasticity", "plasticity", "airfoil", "pipe", "darcy", "navier_stokes")
    }
    assert sizes == {
        "elasticity": ((0, 1000), (-200, None)),
        "plasticity": ((0, 900), (-80, None)),
        "airfoil": ((0, 1000), (1000, 1200)),
        "pipe": ((0, 1000), (1000, 1200)),
        "darcy": ((0, 1000), (0, 200)),
        "navier_stokes": ((0, 1000), (-200, None)),
    }
    assert load_protocol("airfoil").normalisers()["mach"] == "none"
    assert load_protocol("airfoil").normalisers("flare")["mach"] == "standard"


# -- layouts: files of the generators, in the public form ------------------------------------------


@pytest.fixture(scope="module")
def darcy_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("darcy")
    darcy.make_set(folder, cases=5, cells=41**2, seed=0)
    other = tmp_path_factory.mktemp("other")
    [second] = darcy.make_set(other, cases=5, cells=41**2, seed=1)
    second.rename(folder / second.name.replace("smooth1", "smooth2"))
    return folder


DARCY = partial(small, "darcy", {"case": 5, "x": 41, "y": 41}, rename={"r421_N1024": "r41_N5"})


def test_darcy_is_strided_and_tested_on_the_second_file(darcy_files):
    folder = darcy_files
    protocol = DARCY(cuts=([0, 4], [0, 2]))
    train, test = (all_cases(protocol, folder, part) for part in ("train", "test"))
    assert (len(train), len(test)) == (4, 2)
    for cases, seed in ((train, 0), (test, 1)):
        own = darcy.make_case(Request("darcy", 5, 41**2, seed), 2)
        np.testing.assert_array_equal(cases[1]["u"].reshape(9, 9), own["sol"][::5, ::5])
        np.testing.assert_array_equal(cases[1]["coefficient"][:, 0], own["coeff"][::5, ::5].ravel())
        assert cases[1]["u"].dtype == np.float64
    with open_cases(protocol, folder, "train") as cases:
        places = cases.positions()
    # The last axis is the fastest, and both ends are there.
    assert places[[0, 1, 9, 80]].tolist() == [[0, 0], [0, 1 / 8], [1 / 8, 0], [1, 1]]
    assert (train[0]["u"][(places == 0).any(axis=1)] == 0).all()


def test_a_file_of_another_resolution_is_refused_before_it_is_strided(darcy_files):
    folder = darcy_files
    pinned = small("darcy", {"case": 5}, rename={"r421_N1024": "r41_N5"})
    with pytest.raises(DataError, match=r"'coeff' has the shape \[5, 41, 41\], and \[5, 421, 421"):
        open_cases(pinned, folder, "train")
    loose = small(
        "darcy", {"case": None, "x": None, "y": None}, ([0, 4], [0, 2]), {"r421_N1024": "r43_N2"}
    )
    darcy.make_set(folder / "r43", cases=2, cells=43**2, seed=0)
    with pytest.raises(DataError, match="43 along x, which a stride of 5 does not end on"):
        open_cases(loose, folder / "r43", "train")


def test_a_set_with_fewer_cases_than_the_cut_is_refused(darcy_files):
    folder = darcy_files
    with pytest.raises(DataError, match=r"has 5 cases, and train is \[0, 1000\) of them"):
        open_cases(DARCY(), folder, "train")
    with pytest.raises(DataError, match=r"has no file piececonst_r41_N5_smooth1\.mat; fetch"):
        open_cases(DARCY(), folder / "r43", "train")
    with pytest.raises(DataError, match="cut validation from train"):
        open_cases(DARCY(cuts=([0, 4], [0, 2])), folder, "valid")


def test_elasticity_has_the_case_last(tmp_path):
    elasticity.make_set(tmp_path / "elasticity", cases=5, cells=972, seed=0)
    protocol = small("elasticity", {"case": 5}, ([0, 3], [-2, None]))
    train, test = (all_cases(protocol, tmp_path, part) for part in ("train", "test"))
    assert (len(train), len(test)) == (3, 2)
    for case, number in ((train[1], 2), (test[1], 5)):
        own = elasticity.make_case(Request("elasticity", 5, 972, 0), number)
        np.testing.assert_array_equal(case["position"], own["XY"])
        np.testing.assert_array_equal(case["stress"], own["sigma"][:, None])
    with open_cases(protocol, tmp_path, "test") as cases:
        assert cases.positions() is None
        with pytest.raises(DataError, match="elasticity has cases 0 to 1, not 2"):
            cases.case(2)
    turned = np.load(tmp_path / "elasticity/Meshes/Random_UnitCell_sigma_10.npy").T
    np.save(tmp_path / "elasticity/Meshes/Random_UnitCell_sigma_10.npy", turned)
    with pytest.raises(DataError, match=r"\[5, 972\], and \[972, 5\] is needed; its axes are"):
        open_cases(protocol, tmp_path, "train")


@pytest.mark.parametrize("version", ["v5", "v7.3"])
def test_navier_stokes_is_the_same_from_both_versions_of_the_format(tmp_path, version):
    [path] = navier_stokes.make_set(tmp_path, cases=3, cells=256, seed=0, frames=4)
    cases = [
        navier_stokes.make_case(
            navier_stokes.VISCOSITY, 4, Request("navier_stokes", 3, 256, 0), number
        )["u"]
        for number in (1, 2, 3)
    ]
    public = path.with_name("NavierStokes_V1e-5_N3_T4.mat")
    path.rename(public)
    if version == "v5":
        scipy.io.savemat(public, {"u": np.stack(cases)})
    protocol = small(
        "navier_stokes", {"case": 3, "x": 16, "y": 16, "time": 4}, ([0, 2], [-1, None]),
        {"N1200_T20": "N3_T4"},
    )  # fmt: skip
    [last] = all_cases(protocol, tmp_path, "test")
    assert last["vorticity"].shape == (4, 256, 1)
    for frame in range(4):
        np.testing.assert_array_equal(
            last["vorticity"][frame, :, 0].reshape(16, 16), cases[2][..., frame]
        )
    # As published: both ends, though the box is periodic.
    with open_cases(protocol, tmp_path, "test") as opened:
        assert opened.positions()[-1].tolist() == [1.0, 1.0]
    made = load_protocol("navier_stokes_made")
    assert made.rows.positions == "periodic"


def test_plasticity_repeats_the_die_and_orders_time_before_rows(tmp_path):
    rng = np.random.default_rng(0)
    die, motion = rng.normal(size=(4, 7)), rng.normal(size=(4, 7, 3, 5, 4))
    (tmp_path / "plasticity").mkdir()
    file = tmp_path / "plasticity/plas_N987_T20.mat"
    scipy.io.savemat(file, {"input": die, "output": motion})
    sizes = {"case": 4, "x": 7, "y": 3, "time": 5}
    protocol = small("plasticity", sizes, ([0, 2], [-1, None]))
    [case] = all_cases(protocol, tmp_path, "test")
    assert case["die"].shape == (21, 1)
    assert case["motion"].shape == (5, 21, 4)
    for i, j in ((0, 0), (3, 1), (6, 2)):  # row = 3 i + j: y is the fastest
        assert case["die"][3 * i + j, 0] == die[3, i]
        np.testing.assert_array_equal(case["motion"][:, 3 * i + j], motion[3, i, j])


def test_airfoils_take_one_channel_and_join_two_files_to_a_position(tmp_path):
    rng = np.random.default_rng(0)
    x, y, q = rng.normal(size=(6, 5, 4)), rng.normal(size=(6, 5, 4)), rng.normal(size=(6, 5, 5, 4))
    (tmp_path / "airfoil/naca").mkdir(parents=True)
    for name, values in (("X", x), ("Y", y), ("Q", q)):
        np.save(tmp_path / f"airfoil/naca/NACA_Cylinder_{name}.npy", values)
    protocol = small("airfoil", {"case": 6, "x": 5, "y": 4}, ([0, 3], [3, 5]))
    test = all_cases(protocol, tmp_path, "test")
    assert len(test) == 2
    np.testing.assert_array_equal(test[0]["mach"][:, 0], q[3, 4].ravel())
    np.testing.assert_array_equal(test[0]["position"], np.stack([x[3], y[3]], -1).reshape(-1, 2))
    np.save(tmp_path / "airfoil/naca/NACA_Cylinder_Y.npy", y[:5])
    with pytest.raises(DataError, match=r"has the shape \[5, 5, 4\], and \[6, 5, 4\] is needed"):
        open_cases(protocol, tmp_path, "test")


def test_irregular_darcy_has_one_mesh_for_all_cases(tmp_path):
    rng = np.random.default_rng(0)
    nodes, a, u = rng.normal(size=(2, 9)), rng.normal(size=(4, 9)), rng.normal(size=(4, 9))
    scipy.io.savemat(tmp_path / "Darcy.mat", {"MeshNodes": nodes, "c_field": a, "u_field": u})
    protocol = small("irregular_darcy", {"case": 4, "node": 9}, ([0, 2], [-1, None]))
    [case] = all_cases(protocol, tmp_path, "test")
    np.testing.assert_array_equal(case["position"], nodes.T)
    np.testing.assert_array_equal(case["u"][:, 0], u[3])


def test_the_wells_parts_are_its_folders_and_static_fields_have_no_time(tmp_path):
    acoustics.make_set(tmp_path, medium="discontinuous", cases=3, cells=256, seed=0)
    protocol = small("acoustic_discontinuous", {"x": 16, "y": 16})
    for number, part in enumerate(("train", "valid", "test"), 1):
        [case] = all_cases(protocol, tmp_path, part)
        request = Request("acoustics_discontinuous", 3, 256, 0)
        own = acoustics.make_case("discontinuous", request, number)
        assert {name: values.shape for name, values in case.items()} == {
            "pressure": (102, 256, 1),
            "velocity": (102, 256, 2),
            "density": (256, 1),
            "speed_of_sound": (256, 1),
        }
        np.testing.assert_array_equal(case["velocity"], own["velocity"].reshape(102, 256, 2))
        np.testing.assert_array_equal(case["density"][:, 0], own["density"].ravel())
    with pytest.raises(DataError, match=r"\[1, 102, 16, 16\], and \[any, 102, 256, 256\] is"):
        open_cases(load_protocol("acoustic_discontinuous"), tmp_path, "train")
    with pytest.raises(DataError, match=r"has no file data/test/\*\.hdf5; fetch the set"):
        open_cases(protocol, tmp_path / "data", "test")


@pytest.mark.parametrize(
    ("name", "make", "rows"),
    [
        ("darcy_made", partial(darcy.make_set, cells=81), 81),
        ("elasticity_made", partial(elasticity.make_set, cells=48), 48),
    ],
)
def test_what_synth_makes_is_read_by_its_own_protocol(tmp_path, name, make, rows):
    make(tmp_path, cases=201, seed=0)
    protocol = load_protocol(name)
    with open_cases(protocol, tmp_path, "train") as cases:
        assert len(cases) == 1
        assert all(len(values) == rows for values in cases.case(0).values())
    with open_cases(protocol, tmp_path, "test") as cases:
        assert len(cases) == 200


def test_files_are_known_again_by_size_and_checksum(darcy_files):
    protocol = DARCY()
    pins = verify_pins(protocol, darcy_files)
    assert sorted(pins) == [f"piececonst_r41_N5_smooth{k}.mat" for k in (1, 2)]
    assert verify_pins(replace(protocol, pins=pins), darcy_files) == pins
    name = min(pins)
    other = replace(protocol, pins={name: Pin(pins[name].bytes, "0" * 64)})
    with pytest.raises(DataError, match=r"and the protocol darcy is of \d+ and 000000000000…"):
        verify_pins(other, darcy_files)
    with pytest.raises(DataError, match=r"has no file gone\.mat; fetch the set darcy"):
        verify_pins(replace(protocol, pins={"gone.mat": pins[name]}), darcy_files)


# -- statistics ------------------------------------------------------------------------------------


def test_moments_are_joint_over_cases_frames_and_rows_in_float64():
    rng = np.random.default_rng(0)
    # A mean that is large beside the deviation: a difference of squares in float32 has no digit.
    parts = [rng.normal([1000.0, 0.0], size=(3, n, 2)).astype(np.float32) for n in (5, 8, 1)]
    found = moments(({"u": part} for part in parts), ["u"])["u"]
    whole = np.concatenate([part.reshape(-1, 2) for part in parts]).astype(np.float64)
    assert found.mean == pytest.approx(whole.mean(axis=0), rel=1e-14)
    assert found.deviation == pytest.approx(whole.std(axis=0), rel=1e-10)
    there = found.standardise(whole, 1e-8)
    assert there.mean(axis=0) == pytest.approx([0, 0], abs=1e-10)
    assert found.decode(there, 1e-8) == pytest.approx(whole, rel=1e-14)
    assert found.standardise(parts[0], 1e-8).dtype == np.float32


def test_a_constant_field_is_not_divided_by_nothing():
    flat = Moments(np.array([2.0]), np.array([0.0]))
    assert flat.standardise(np.full((3, 1), 2.0), 1e-8).tolist() == [[0.0]] * 3


# -- what is refused -------------------------------------------------------------------------------

GRID = {"domain": "grid", "axes": ["x", "y"], "positions": "nodes"}
SHORT = {"source": "s", "epochs": 1, "batch": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"titel": "x"}, "protocol darcy: unknown key titel; did you mean title?"),
        ({"metric": None}, "protocol darcy: metric=None"),
        ({"rows": GRID | {"positions": "middle"}}, "rows.positions=middle"),
        ({"rows": GRID | {"axes": ["node"]}}, "x, y or z of a grid"),
        ({"rows": GRID | {"positions": "field"}}, "role position"),
        ({"cuts": None}, "cuts=None; it must be given where the layout is arrays"),
        ({"eps": -1.0}, "eps=-1.0"),
        ({"recipes": {"a": {"source": "s", "epochs": 1, "batch": 0}}}, "recipes.a.batch=0"),
        ({"recipes": {"a": {"source": "s", "epochs": 1}}}, "recipes.a.batch is missing"),
        (
            {"recipes": {"a": SHORT | {"normalise": {"v": "none"}}}},
            "recipes.a.normalise=['v']; it must be of the protocol's fields",
        ),
        ({"published": [{"model": "m"}]}, "published.0.source is missing"),
    ],
)  # fmt: skip
def test_a_wrong_key_or_value_is_named(change, message):
    data = yaml.safe_load(known_protocols()["darcy"].read_text())
    with pytest.raises(ConfigError, match=re.escape(message)):
        Protocol.from_dict({"name": "darcy", **data, **change})


def test_an_unknown_protocol_is_named_with_the_nearest():
    with pytest.raises(ConfigError, match="protocol=darzy is unknown; did you mean darcy"):
        load_protocol("darzy")


def test_files_that_are_no_protocols_are_told_in_one_line(tmp_path):
    for text, message in (("a: [", "cannot be read"), ("- 1", "not keys and values")):
        (tmp_path / "p.yaml").write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_protocol(tmp_path / "p.yaml")
    with pytest.raises(ConfigError, match="does not exist"):
        load_protocol(tmp_path / "q.yaml")
