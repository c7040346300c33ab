"""What holds for all generators: any number of processes, nothing of others, nothing half."""

from __future__ import annotations

from functools import partial

import pytest

from cpflare.errors import DataError
from data_prep.generators import GENERATORS
from data_prep.physics import acoustics, darcy, elasticity, making

SMALL = {"darcy": 81, "elasticity": 48, "acoustics_discontinuous": 256, "navier_stokes": 256}


def files(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["darcy", "acoustics_discontinuous"])  # at once, case by case
def test_files_do_not_depend_on_the_number_of_processes(tmp_path, kind):
    for workers in (1, 2):
        out = tmp_path / str(workers)
        made = GENERATORS[kind](out, cases=5, cells=SMALL[kind], seed=3, workers=workers)
        assert all(path.is_file() for path in made)
    one, two = files(tmp_path / "1"), files(tmp_path / "2")
    assert one == two
    assert len(one) > 1


@pytest.mark.parametrize("kind", ["darcy", "elasticity"])
def test_a_set_is_made_again_but_never_over_another(tmp_path, kind):
    make = partial(GENERATORS[kind], tmp_path, cells=SMALL[kind])
    make(cases=2, seed=0)
    before = files(tmp_path)
    make(cases=2, seed=0)
    assert files(tmp_path) == before
    for other in ({"cases": 2, "seed": 1}, {"cases": 3, "seed": 0}):
        with pytest.raises(DataError, match=r"is there already, and not of --kind .*remove it"):
            make(**other)
    (tmp_path / making.MARK).unlink()
    with pytest.raises(DataError, match="is there already"):
        make(cases=2, seed=0)
    assert files(tmp_path).keys() == before.keys() - {making.MARK}


@pytest.mark.parametrize("kind", SMALL)
def test_a_failed_case_leaves_no_file_of_the_set(tmp_path, kind, monkeypatch):
    from data_prep.physics import navier_stokes

    def fail(*_):
        raise RuntimeError("disk full")

    for module in (darcy, elasticity, acoustics, navier_stokes):
        monkeypatch.setattr(module, "make_case", fail)
    with pytest.raises(RuntimeError, match="disk full"):
        GENERATORS[kind](tmp_path, cases=2, cells=SMALL[kind], seed=0)
    assert list(files(tmp_path)) == [making.MARK]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"cases": 0}, "cases=0: at least 1 is needed; set --cases 8"),
        ({"cells": 5}, "cells=5: a case of darcy has 64 to 1,000,000 rows"),
        ({"seed": -1}, "seed=-1: seeds are not negative"),
        ({"workers": 0}, "workers=0: at least 1 is needed"),
    ],
)
def test_numbers_that_cannot_be_met_are_refused(tmp_path, numbers, message):
    with pytest.raises(DataError, match=message):
        darcy.make_set(tmp_path, **{"cases": 1, "cells": 81, "seed": 0, **numbers})


def test_a_file_in_the_folders_place_is_refused(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(DataError, match="is a file; give the name of a folder"):
        darcy.make_set(tmp_path / "out", cases=1, cells=81, seed=0)
    assert (tmp_path / "out").read_text() == "mine"


def test_more_than_the_format_holds_is_refused(tmp_path, monkeypatch):
    from data_prep.physics import mat_files

    monkeypatch.setattr(mat_files, "MOST_BYTES_V5", 1000)
    with pytest.raises(DataError, match=r"MAT v5 holds 2 GiB an array; set fewer --cases"):
        darcy.make_set(tmp_path, cases=1, cells=144, seed=0)
    assert list(files(tmp_path)) == [making.MARK]
