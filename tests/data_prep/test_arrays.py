"""Files of arrays of every format: the same numbers, in parts, and one line on what is wrong."""

from __future__ import annotations

import pickle
import struct

import h5py
import numpy as np
import pytest
import scipy.io
import torch

from cpflare.errors import DataError
from cpflare.formats.arrays import WHOLE, open_arrays
from cpflare.formats.well import WellFile
from data_prep.physics import acoustics, navier_stokes
from data_prep.physics.mat_files import v73_dataset, v73_file

VALUES = np.arange(60, dtype=np.float64).reshape(5, 4, 3) / 7


def write(path, values):
    if path.suffix == ".npy":
        np.save(path, values)
    elif path.suffix == ".npz":
        np.savez_compressed(path, u=values, text=np.array("no number"))
    elif path.name == "v5.mat":
        scipy.io.savemat(path, {"u": values, "text": "no number"})
    elif path.name == "v73.mat":
        with v73_file(path, "test") as file:
            made = v73_dataset(file, "u", values.shape, str(values.dtype))
            made[...] = values.T
    elif path.suffix == ".hdf5":
        with h5py.File(path, "w") as file:
            file.create_group("g")["u"] = values
            file["g/text"] = "no number"
    else:
        torch.save({"g": {"u": torch.from_numpy(values)}, "step": 3}, path)
    return path


NAMES = {
    "a.npy": WHOLE, "a.npz": "u", "v5.mat": "u", "v73.mat": "u", "a.hdf5": "g/u", "a.pt": "g.u"
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("file", NAMES)
def test_all_formats_give_the_same_array_and_parts_of_it(tmp_path, file, dtype):
    values = VALUES.astype(dtype)
    with open_arrays(write(tmp_path / file, values)) as arrays:
        assert list(arrays.stored) == [NAMES[file]]
        stored = arrays.expect(NAMES[file], (5, None, 3))
        assert (stored.shape, stored.dtype) == ((5, 4, 3), np.dtype(dtype))
        for part in (np.s_[:], np.s_[1:3], 2, np.s_[:, 1], np.s_[1:5:2, :, 0], np.s_[-1]):
            found = arrays.read(NAMES[file], part)
            assert found.dtype == dtype
            np.testing.assert_array_equal(found, values[part])


@pytest.mark.parametrize("file", NAMES)
def test_a_wrong_name_or_shape_is_told_in_one_line(tmp_path, file):
    with open_arrays(write(tmp_path / file, VALUES)) as arrays:
        name = NAMES[file]
        with pytest.raises(DataError, match=rf"has no array '{name}s'; did you mean {name}\?"):
            arrays.read(name + "s")
        with pytest.raises(DataError, match=r"shape \[5, 4, 3\], and \[5, 4, 4\] is needed"):
            arrays.expect(name, (5, 4, 4))
        with pytest.raises(DataError, match="its axes are in reverse"):
            arrays.expect(name, (3, 4, 5))
        with pytest.raises(DataError, match=rf"{file}: array .* has no such part|cannot be read"):
            arrays.read(name, 17)


@pytest.mark.parametrize("file", NAMES)
@pytest.mark.parametrize("damage", ["cut", "empty", "noise"])
def test_a_damaged_file_is_told_in_one_line(tmp_path, file, damage):
    path = write(tmp_path / file, np.ones((50, 40, 3)))
    whole = path.read_bytes()
    cut = whole[: 2 * len(whole) // 3]
    noise = np.random.default_rng(0).bytes(len(whole))
    path.write_bytes({"cut": cut, "empty": b"", "noise": noise}[damage])
    with pytest.raises(DataError) as caught, open_arrays(path) as arrays:
        arrays.read(NAMES[file])
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


class Harm:
    def __reduce__(self):
        return (print, ("run",))


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".pt"])
def test_no_pickle_is_ever_loaded(tmp_path, suffix, capsys):
    path = tmp_path / f"a{suffix}"
    objects = np.array([Harm()], dtype=object)
    if suffix == ".npy":
        np.save(path, objects, allow_pickle=True)
    elif suffix == ".npz":
        np.savez(path, objects=objects, u=VALUES)
    else:
        path.write_bytes(pickle.dumps(Harm()))
    if suffix == ".npz":  # its numbers can be read all the same
        with open_arrays(path) as arrays:
            assert list(arrays.stored) == ["u"]
            with pytest.raises(DataError, match="has no array 'objects'"):
                arrays.read("objects")
    else:
        with pytest.raises(DataError, match="without pickles"):
            open_arrays(path)
    assert capsys.readouterr().out == ""


def test_files_that_are_not_there_or_of_another_kind_are_told(tmp_path):
    for name, message in (
        ("a.npy", "does not exist"), ("a.csv", "is no file of arrays; read are .npy")
    ):  # fmt: skip
        with pytest.raises(DataError, match=message):
            open_arrays(tmp_path / name)
    (tmp_path / "folder.mat").mkdir()
    with pytest.raises(DataError, match="is a folder"):
        open_arrays(tmp_path / "folder.mat")


def test_whole_numbers_that_matlab_stores_in_bytes_are_doubles(tmp_path):
    """MATLAB writes them so; scipy itself never does, hence a file by hand: a double in bytes."""

    def element(kind, data):
        return struct.pack("<II", kind, len(data)) + data.ljust(-(-len(data) // 8) * 8, b"\0")

    flags, shape = element(6, struct.pack("<II", 6, 0)), element(5, struct.pack("<ii", 1, 3))
    matrix = element(14, flags + shape + element(1, b"u") + element(2, bytes([1, 2, 200])))
    head = b"MATLAB 5.0 MAT-file".ljust(124) + b"\x00\x01IM"
    (tmp_path / "a.mat").write_bytes(head + matrix)
    with open_arrays(tmp_path / "a.mat") as arrays:
        assert arrays.stored["u"].dtype == arrays.read("u").dtype == np.float64
        assert arrays.read("u").tolist() == [[1.0, 2.0, 200.0]]
    scipy.io.savemat(tmp_path / "b.mat", {"on": np.array([[True, False]])})
    with open_arrays(tmp_path / "b.mat") as arrays:
        assert arrays.read("on").tolist() == [[True, False]]


def test_npy_and_hdf5_read_no_more_than_is_asked_for(tmp_path):
    """A file with a hole of 64 GiB: any reader of the whole would need that much memory."""
    path = tmp_path / "a.npy"
    huge = np.lib.format.open_memmap(path, "w+", np.float64, (1 << 20, 1 << 13))
    huge[5, 3] = 7.0
    del huge
    with open_arrays(path) as arrays:
        assert arrays.read(WHOLE, np.s_[5:6, 3]).tolist() == [7.0]
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file.create_dataset("u", (1 << 20, 1 << 13), "f8", chunks=(1, 1 << 13))[5, 3] = 7.0
    with open_arrays(tmp_path / "a.hdf5") as arrays:
        assert arrays.read("u", np.s_[5:6, 3]).tolist() == [7.0]


def test_axes_of_a_generated_v73_file_are_those_that_matlab_shows(tmp_path):
    [path] = navier_stokes.make_set(tmp_path, cases=2, cells=256, seed=0, frames=2)
    request = navier_stokes.Request("navier_stokes", 2, 256, 0)
    own = navier_stokes.make_case(navier_stokes.VISCOSITY, 2, request, 2)
    with open_arrays(path) as arrays:
        assert arrays.reversed_axes
        assert arrays.stored["u"].shape == (2, 16, 16, 2)
        np.testing.assert_array_equal(arrays.read("u", 1), own["u"])
        np.testing.assert_array_equal(arrays.read("u", np.s_[1, :, :, 0]), own["u"][..., 0])


# -- The Well --------------------------------------------------------------------------------------


def test_the_wells_files_are_read_by_trajectory_and_frame(tmp_path):
    paths = acoustics.make_set(tmp_path, medium="discontinuous", cases=2, cells=256, seed=0)
    request = acoustics.Request("acoustics_discontinuous", 2, 256, 0)
    own = acoustics.make_case("discontinuous", request, 2)
    with WellFile(paths[0]) as file:
        assert (file.trajectories, file.num_frames, file.grid) == (2, 102, (16, 16))
        assert file.boundaries() == {"x": "WALL", "y": "OPEN"}
        assert {n: (f.order, f.by_time) for n, f in file.fields.items()} == {
            "pressure": (0, True),
            "density": (0, False),
            "speed_of_sound": (0, False),
            "velocity": (1, True),
        }
        part = np.s_[3:9:2]
        np.testing.assert_array_equal(file.frames("velocity", 1, part), own["velocity"][part])
        np.testing.assert_array_equal(file.frames("density", 1), own["density"][None])
        np.testing.assert_array_equal(file.frames("density", 1, part), own["density"][None])
        for message, ask in (
            ("has no field 'p'; it has pressure", lambda: file.frames("p", 0)),
            ("has trajectories 0 to 1, not 2", lambda: file.frames("pressure", 2)),
            ("has frames 0 to 101", lambda: file.frames("pressure", 0, slice(200, 300))),
        ):
            with pytest.raises(DataError, match=message):
                ask()


def test_axes_that_do_not_vary_are_there_again(tmp_path):
    [path] = acoustics.make_set(tmp_path, medium="discontinuous", cases=1, cells=256, seed=0)
    with h5py.File(path, "r+") as file:
        fields = file["t0_fields"]
        del fields["density"], fields["speed_of_sound"]
        fields["density"] = np.arange(256.0).reshape(16, 16)
        fields["density"].attrs.update(
            dim_varying=[True, True], sample_varying=False, time_varying=False
        )
        fields["speed_of_sound"] = np.arange(16.0)[None]
        fields["speed_of_sound"].attrs.update(
            dim_varying=[False, True], sample_varying=True, time_varying=False
        )
    with WellFile(path) as file:
        assert file.frames("density", 0).shape == (1, 16, 16)
        found = file.frames("speed_of_sound", 0)
        assert found.shape == (1, 1, 16)
        assert found[0, 0, 3] == 3.0


def test_a_field_that_belies_its_flags_is_refused(tmp_path):
    [path] = acoustics.make_set(tmp_path, medium="discontinuous", cases=1, cells=256, seed=0)
    with h5py.File(path, "r+") as file:
        file["t0_fields/density"].attrs["time_varying"] = True
    with pytest.raises(DataError, match=r"density' has the shape \[1, 16, 16\], and \[1, 102, 16"):
        WellFile(path)
    with pytest.raises(DataError, match="not laid out as The Well"):
        WellFile(write(tmp_path / "a.hdf5", VALUES))
