"""Commands × broken environments: one line, exit 2, no traceback, and nothing half-written."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from cpflare import cli
from cpflare.parallel.runtime import run_guarded
from data_prep.vtp_to_zarr import prepare
from launch import predict_cp, train_cp
from support.stores import SMALL, train_rank, write_bodies

pytest.importorskip("pyvista")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Bodies, their store, a run on it and evaluated predictions with and without a mesh."""
    folder = tmp_path_factory.mktemp("broken")
    write_bodies(folder / "bodies")
    assert prepare([folder / "bodies"], folder / "store").ok
    store = f"data.store={folder / 'store'}"
    train_rank(0, 1, [store, f"run.dir={folder / 'run'}", *SMALL, "train.steps=1"])
    split = ["--split", "test", "--out", str(folder / "out")]
    predict_cp.main([str(folder / "run"), *split])
    return folder


def command(arguments):
    """Exit status of `cpflare …`, or of a launcher's rank for train and predict."""
    launchers = {"train": train_cp.main, "predict": predict_cp.main}
    if arguments[0] in launchers:
        return run_guarded(lambda: launchers[arguments[0]](arguments[1:]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["cpflare", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return ended.value.code or 0


def commands(made, place):
    """Every command that writes or reads `place`, a path that cannot be what is wanted."""
    place = str(place)
    run, store, out = (str(made / name) for name in ("run", "store", "out"))
    once = ("quickstart", *SMALL, "train.steps=1", "train.eval_every=0", "data.val_split=[]")
    return [
        ["synth", place, "--cases", "1", "--cells", "400"],
        ["prep", str(made / "bodies"), place],
        ["prep", place, f"{place}-store"],
        ["prep", str(made / "bodies"), str(made / "new"), "--map", place],
        ["prep", str(made / "bodies"), str(made / "new"), "--splits", place],
        ["inspect", place],
        ["inspect", f"{place}.vtp"],
        ["evaluate", place, "--store", store],
        ["evaluate", out, "--store", place],
        ["export", place, "--format", "npz-chunks"],
        ["export", out, "--format", "zarr", "--map", place],
        ["convert", store, place, "--layout", "curator-v3"],
        ["convert", place, str(made / "converted"), "--layout", "flare"],
        ["report", place],
        ["report", run, "--predictions", place],
        ["plan", "--cells", "1e4", "--config", place],
        ["plan", "--cells", "1e4", "--calibrate", place],
        ["scaling", "--study", place, "--out", str(made / "study")],
        ["train", *once, f"data.store={place}", f"run.dir={made / 'none'}"],
        ["train", *once, f"data.store={store}", f"run.dir={place}"],
        ["train", place, f"data.store={store}"],
        ["train", *once, f"data.store={store}", f"run.dir={made / 'none'}",
         f"train.init_from={place}"],
        ["train", *once, f"data.store={store}", f"run.dir={made / 'none'}",
         f"train.resume={place}"],
        ["predict", place, "--split", "test", "--out", f"{place}-out"],
        ["predict", run, "--split", "test", "--out", place],
        ["predict", run, "--split", "test", "--out", f"{made / 'o'}", "--store", place],
        ["predict", run, "--mesh", place, "--out", f"{made / 'o'}"],
        ["predict", run, "--mesh", f"{place}.vtp", "--out", f"{made / 'o'}"],
    ]  # fmt: skip


def below_a_file(folder):
    (folder / "file").write_text("text")
    return folder / "file" / "x"


def a_loop(folder):
    (folder / "loop").symlink_to(folder / "loop")
    return folder / "loop" / "x"


def a_link_to_nothing(folder):
    (folder / "link").symlink_to(folder / "gone" / "away")
    return folder / "link"


PLACES = {
    "below a file": below_a_file,
    "a link to nothing": a_link_to_nothing,
    "a loop of links": a_loop,
    "too long a name": lambda folder: folder / ("n" * 300),
    "no folder of the system": lambda folder: Path("/proc/none/x"),
    "below a device": lambda folder: Path("/dev/full/x"),
}


def check(arguments, status, text, *, may_pass=False):
    assert "Traceback" not in text, (arguments, text)
    if may_pass and status == 0:
        return
    lines = [line for line in text.replace("\r", "\n").splitlines() if line.startswith("error")]
    assert status == 2, (arguments, status, text)
    assert len(lines) == 1, (arguments, text)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_place_that_is_broken_is_one_line(made, tmp_path, capfd, place):
    path = PLACES[place](tmp_path)
    for arguments in commands(made, path):
        capfd.readouterr()
        status = command(arguments)
        # A command may make a folder where a link leads.
        check(arguments, status, capfd.readouterr().err, may_pass="link" in place)
    assert not list(tmp_path.rglob("*.partial"))
    assert not list(made.rglob(".*.partial"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [b"\xff\xfe name", b"line\nbreak", b"car[red], two"])
def test_an_odd_name_is_one_line_or_works(made, tmp_path, capfd, name):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
    shutil.copytree(made / "bodies" / "run_1", path)
    for arguments in commands(made, path):
        capfd.readouterr()
        status = command(arguments)
        check(arguments, status, capfd.readouterr().err, may_pass=True)
    shutil.rmtree(made / "none", ignore_errors=True)


READ = {
    "bodies": lambda m, f: [["prep", f, m / "new"], ["inspect", next(Path(f).rglob("*.vtp"), f)]],
    "store": lambda m, f: [
        ["inspect", f, "--verify"],
        ["evaluate", m / "out", "--store", f],
        ["convert", f, m / "c", "--layout", "flare"],
        ["prep", m / "bodies", f],
        ["predict", m / "run", "--split", "test", "--store", f, "--out", m / "o"],
    ],
    "run": lambda m, f: [
        ["report", f],
        ["predict", f, "--split", "test", "--store", m / "store", "--out", m / "o"],
    ],
    "out": lambda m, f: [
        ["evaluate", f, "--store", m / "store"],
        ["export", f, "--format", "zarr"],
        ["report", m / "run", "--predictions", f],
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["gone", "cut", "empty", "a folder"])
@pytest.mark.parametrize("what", READ)
def test_files_that_vanish_or_are_cut_are_one_line(made, tmp_path, capfd, what, damage):
    shutil.copytree(made, tmp_path / "m", ignore=shutil.ignore_patterns("new", "o", "none"))
    place = tmp_path / "m" / what
    kinds = {(p.suffix, p.name if p.suffix else p.parent.name): p for p in sorted(place.rglob("*"))}
    for path in [p for p in kinds.values() if p.is_file()]:
        whole = path.read_bytes()
        path.unlink()
        if damage == "a folder":
            path.mkdir()
        elif damage != "gone":
            path.write_bytes(whole[: len(whole) // 2] if damage == "cut" else b"")
        for arguments in READ[what](tmp_path / "m", place):
            capfd.readouterr()
            status = command([str(argument) for argument in arguments])
            text = "".join(capfd.readouterr())  # what `inspect` finds is its output
            if arguments[0] == "inspect" and ("damage" in text or "problems" in text):
                assert "Traceback" not in text
                continue
            check([path.name, *arguments], status, text, may_pass=True)
            assert status in (0, 2), (path, arguments, text)
        if path.is_dir():
            path.rmdir()
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(whole)


def writers(made, out):
    """Commands that write where there is no room."""
    run, store = str(made / "run"), str(made / "store")
    return {
        "synth": ["synth", str(out / "s"), "--cases", "1", "--cells", "400"],
        "prep": ["prep", str(made / "bodies"), str(out / "store")],
        "evaluate": ["evaluate", str(out / "p"), "--store", store],
        "export zarr": ["export", str(out / "p"), "--format", "zarr"],
        "export chunks": ["export", str(out / "p"), "--format", "npz-chunks"],
        "convert": ["convert", store, str(out / "c"), "--layout", "flare"],
        "convert zarr": ["convert", store, str(out / "c"), "--layout", "curator-v3"],
        "report": ["report", str(out / "r")],
        "predict": ["predict", run, "--split", "test", "--out", str(out / "q")],
        "train": ["train", "quickstart", f"data.store={store}", f"run.dir={out / 't'}", *SMALL,
                  "train.steps=1", "train.eval_every=0"],
    }  # fmt: skip


@contextmanager
def no_room():
    """No file grows beyond 64 bytes; what is said meanwhile goes through a pipe."""
    said = []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    read, write = os.pipe()
    with pytest.MonkeyPatch.context() as patch, os.fdopen(write, "w", buffering=1) as stream:
        for name in ("stdout", "stderr"):
            patch.setattr(sys, name, stream)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
        try:
            yield said
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, ignored)
    with os.fdopen(read) as stream:
        said.append(stream.read())


@pytest.mark.slow
@pytest.mark.parametrize("what", list(writers(Path(), Path())))
def test_a_full_disk_is_one_line_and_leaves_no_part(made, tmp_path, what):
    shutil.copytree(made / "out", tmp_path / "p")
    shutil.copytree(made / "run", tmp_path / "r")
    before = {p for p in tmp_path.rglob("*") if p.is_file()}
    arguments = writers(made, tmp_path)[what]
    with no_room() as said:
        status = command(arguments)
    check(arguments, status, "".join(said))
    left = {p for p in tmp_path.rglob("*") if p.is_file()} - before
    assert not [p for p in left if p.name in ("cpflare.json", "metrics.json", "report.html")]
    assert not [p for p in left if p.suffix in (".vtp", ".npz", ".safetensors")], left


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, UnicodeDecodeError])
def test_what_python_raises_is_one_line_in_a_command(monkeypatch, capfd, error):
    def fail(*_, **__):
        if error is UnicodeDecodeError:
            b"\xff".decode()
        raise error

    monkeypatch.setattr("cpflare.report.html.write_report", fail)
    status = command(["report", "run"])
    text = capfd.readouterr().err
    assert status == (130 if error is KeyboardInterrupt else 2)
    assert "Traceback" not in text
    if error is not KeyboardInterrupt:
        assert text.startswith("error: ")
        assert text.count("\n") == 1
