"""Sources stay, a broken place is one line, nothing made up takes the place of what was meant."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cpflare import cli
from cpflare.data.store import Store
from cpflare.errors import CpflareError
from cpflare.evaluate.evaluate import evaluate_predictions
from cpflare.files import checksum, explain
from cpflare.parallel.runtime import run_guarded
from cpflare.train.run_dir import read_run
from data_prep.vtp_to_zarr import prepare
from launch import predict_cp, train_cp
from support.stores import SMALL, train_rank, write_bodies

pytest.importorskip("pyvista")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Bodies with one file each in a flat folder, a store of them, a run, and predictions."""
    folder = tmp_path_factory.mktemp("lost")
    write_bodies(folder / "bodies")
    (folder / "flat").mkdir()
    for path in (folder / "bodies").rglob("*.vtp"):
        path.rename(folder / "flat" / f"{path.parent.name}_body.vtp")
    assert prepare([folder / "flat"], folder / "store").ok
    overrides = [f"data.store={folder / 'store'}", f"run.dir={folder / 'run'}", *SMALL]
    train_rank(0, 1, [*overrides, "train.steps=2", "data.tokens=all"])
    return folder


def sums(folder):
    return {path: checksum(path) for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def link_to(kind, target, place):
    if kind == "a hard link":
        place.mkdir()
        for path in target.iterdir():
            os.link(path, place / path.name)
    elif kind == "links":
        place.mkdir()
        for path in target.iterdir():
            (place / path.name).symlink_to(path)
    else:
        place.symlink_to(target)
    return place


@pytest.mark.parametrize("kind", ["itself", "a linked folder", "links", "a hard link"])
def test_predictions_never_take_their_sources_place(folder, tmp_path, kind):
    flat = folder / "flat"
    out = flat if kind == "itself" else link_to(kind, flat, tmp_path / "out")
    before = sums(flat), sums(out)
    for what in (["--split", "train"], ["--mesh", str(next(iter(sorted(flat.iterdir()))))]):
        with pytest.raises(CpflareError, match=r"would overwrite the source.*name another folder"):
            predict_cp.main([str(folder / "run"), *what, "--out", str(out)])
    assert (sums(flat), sums(out)) == before


def test_an_export_never_takes_a_source_s_place(folder, tmp_path):
    moved = tmp_path / "vtp"
    (folder / "flat").rename(tmp_path / "away")
    try:
        predict_cp.main([str(folder / "run"), "--cases", "run_1_body", "--out", str(tmp_path)])
        (tmp_path / "away").rename(moved)
        before = sums(moved)
        arguments = ["export", str(tmp_path), "--format", "vtp", "--source", str(moved)]
        result = CliRunner().invoke(cli.app, arguments)
        assert "would overwrite the source" in str(result.exception)
        assert sums(moved) == before
    finally:
        (moved if moved.exists() else tmp_path / "away").rename(folder / "flat")


@pytest.mark.parametrize(
    ("number", "mend"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EROFS, "can be read and written"),
        (errno.EACCES, "can be read and written"),
        (errno.ENOTDIR, "a file stands where a folder is wanted"),
        (errno.EISDIR, "a folder stands where a file is wanted"),
        (errno.ENOENT, "give a path that exists"),
        (errno.ENAMETOOLONG, "a shorter name"),
    ],
)
def test_what_the_system_refuses_is_one_line_in_a_command_and_on_a_rank(
    number, mend, monkeypatch, capfd
):
    def refuse(*arguments, **named):
        raise OSError(number, os.strerror(number), "some/where\nelse")

    monkeypatch.setattr("cpflare.report.html.write_report", refuse)
    monkeypatch.setattr(sys, "argv", ["cpflare", "report", "run"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    statuses = [ended.value.code, run_guarded(refuse)]
    assert statuses == [2, 2]
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("error: some/where else: ")
        assert mend in line


def test_names_that_are_no_text_are_told():
    with pytest.raises(UnicodeEncodeError) as caught:
        "\udcff".encode()
    assert "no UTF-8" in explain(caught.value)


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_failure(folder):
    command = [sys.executable, "-m", "cpflare.cli", "inspect", str(folder / "store")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait() in (0, 1)
    assert error == b""


def test_toy_cars_never_take_the_place_of_a_store_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["data.store=my_own.zarr", f"run.dir={tmp_path / 'run'}", *SMALL, "train.steps=2"]
    with pytest.raises(CpflareError, match=r"my_own\.zarr.*cpflare prep"):
        train_cp.main(arguments)
    assert not (tmp_path / "my_own.zarr").exists()
    assert not (tmp_path / "source").exists()
    (tmp_path / "data" / "quickstart" / "store").mkdir(parents=True)
    (tmp_path / "data" / "quickstart" / "store" / "notes.txt").write_text("mine")
    with pytest.raises(CpflareError, match="a folder of other things"):
        train_cp.main(arguments[1:])


def test_a_run_knows_what_it_was_trained_on_whatever_the_store_says_later(folder, tmp_path, capfd):
    store = tmp_path / "store"
    shutil.copytree(folder / "store", store)
    opened = Store.open(store)
    trained, held_out = opened.split("train")[0], opened.split("val")[0]
    mark = json.loads((store / "cpflare.json").read_text())
    mark["splits"] = {"train": [held_out], "val": [], "test": [trained]}
    (store / "cpflare.json").write_text(json.dumps(mark))
    arguments = ["--store", str(store), "--out", str(tmp_path / "out")]
    predict_cp.main([str(folder / "run"), "--cases", f"{trained},{held_out}", *arguments])
    assert f"notice: seen in training: {trained}\n" in capfd.readouterr().err
    notices = evaluate_predictions(tmp_path / "out", Store.open(store))["notices"]
    assert f"seen in training: {trained}" in notices
    assert not any("perhaps seen" in notice for notice in notices)


def test_what_a_run_knows_of_a_case_is_its_content_before_its_name(folder):
    run, store = read_run(folder / "run"), Store.open(folder / "store")
    trained, held_out = store.case(store.split("train")[0]), store.case(store.split("val")[0])
    content = trained.attrs["source_checksum"]

    def known(case, cases):
        return replace(run, dataset={**run.dataset, "train_cases": cases}).was_trained_on(case)

    assert known(trained, {"another name": content}) is True
    assert known(trained, {trained.name: None}) is True
    assert known(trained, {trained.name: "other content"}) is None
    assert known(held_out, {trained.name: content}) is False
    assert known(trained, None) is None


def test_a_run_that_does_not_say_what_it_was_trained_on_has_the_stores_split(
    folder, tmp_path, capfd
):
    shutil.copytree(folder / "run", tmp_path / "run")
    content = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    del content["dataset"]["train_cases"]
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(content))
    names = Store.open(folder / "store").split("train")
    predict_cp.main([str(tmp_path / "run"), "--split", "train", "--out", str(tmp_path / "out")])
    said = f"notice: in the store's split 'train', so perhaps seen: {', '.join(names)}\n"
    assert capfd.readouterr().err.count(said) == 1
