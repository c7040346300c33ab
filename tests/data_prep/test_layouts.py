"""Layouts of other projects go out and come back."""

from __future__ import annotations

import shutil
import sys

import numpy as np
import pytest
import zarr

from cpflare import cli
from cpflare.data import Store
from cpflare.data.verify import inspect_store
from cpflare.errors import DataError
from data_prep import layouts
from data_prep.fields import load_field_map
from data_prep.read import load_case
from support.paths import REAL
from support.surfaces import make, prep

real = pytest.mark.skipif(not REAL.is_dir(), reason="the shared real files are absent")


@pytest.mark.slow
@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_layouts_of_others_go_out_and_come_back(tmp_path, layout, monkeypatch, capsys):
    data = make(tmp_path / "data", 2)
    prep(data, tmp_path / "s")
    store = Store.open(tmp_path / "s")
    command = ["cpflare", "convert", tmp_path / "s", tmp_path / "out", "--layout", layout]
    for status, said in ((0, "2 cases in"), (2, "is there already; remove it")):
        monkeypatch.setattr(sys, "argv", list(map(str, command)))
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert (ended.value.code or 0) == status
        assert said in "".join(capsys.readouterr())
    for name in store.cases:
        if layout == "flare":  # as the release has the areas
            source = load_case(
                data / name / f"boundary_{name[4:]}.vtp", load_field_map("drivaerml")
            )
            areas = source.fields["area"].astype("<f4")
            np.save(tmp_path / "out" / name / f"boundary_cell_area_{name[4:]}.npy", areas)
    if layout != "flare":
        group = zarr.open_group(tmp_path / "out" / "run_1.zarr", mode="r")
        assert group.metadata.zarr_format == int(layout[-1])
        assert group["surface_fields"].shape == (store.case("run_1").num_rows, 4)
        assert {group[n].dtype for n in group} == {np.dtype("f4")}
    written = tmp_path / "out" / ("run_1" if layout == "flare" else "run_1.zarr")
    shutil.copytree(written, written.with_name(f".{written.name}.partial"))
    summary = prep(tmp_path / "out", tmp_path / "back")
    assert summary.done == ["run_1", "run_2"], summary.failed
    back = Store.open(tmp_path / "back")
    assert inspect_store(tmp_path / "back", verify=True).ok
    for name in store.cases:
        mine, theirs = store.case(name).read(), back.case(name).read()
        a, b = np.argsort(mine["cell_id"]), np.argsort(theirs["cell_id"])
        for field in ("pressure", "wall_shear", "position", "normal", "area", "area_vector"):
            np.testing.assert_allclose(theirs[field][b], mine[field][a], atol=5e-7, rtol=2e-7)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    prep(make(tmp_path / "data", 1), tmp_path / "s")
    (tmp_path / "out").write_text("a file")
    with pytest.raises(DataError, match="cannot be written"):
        layouts.write(Store.open(tmp_path / "s").case("run_1"), tmp_path / "out", "flare")


def test_flare_files_without_areas_make_a_store_without_them(tmp_path):
    data = make(tmp_path / "data", 1)
    prep(data, tmp_path / "s")
    layouts.write(Store.open(tmp_path / "s").case("run_1"), tmp_path / "out", "flare")
    prep(tmp_path / "out", tmp_path / "back")
    case = Store.open(tmp_path / "back").case("run_1")
    assert "area" not in case.fields
    assert any("no areas" in n for n in case.attrs["notices"])
    (tmp_path / "out" / "run_1" / "boundary_1_tau.npy").unlink()
    summary = prep(tmp_path / "out", tmp_path / "third")
    assert "boundary_1_tau.npy is missing" in summary.failed["run_1"]


def test_a_curator_group_that_lacks_chunks_is_refused(tmp_path):
    data = make(tmp_path / "data", 1)
    prep(data, tmp_path / "s")
    layouts.write(Store.open(tmp_path / "s").case("run_1"), tmp_path / "out", "curator-v2")
    (tmp_path / "out" / "run_1.zarr" / "surface_normals" / "0.0").unlink()
    summary = prep(tmp_path / "out", tmp_path / "back")
    assert "surface_normals lacks 1 of 1 chunks" in summary.failed["run_1"]
    shutil.rmtree(tmp_path / "out" / "run_1.zarr" / "surface_fields")
    summary = prep(tmp_path / "out", tmp_path / "back")
    assert "is no curator Zarr group" in summary.failed["run_1"]
