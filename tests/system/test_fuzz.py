"""Thousands of mutated stores, meshes and checkpoints: a clear error each, no crash, no hang."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import re
import resource
import shutil
import signal
import time
import traceback
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from cpflare.config import load_config
from cpflare.data.store import Store
from cpflare.errors import CpflareError, DataError
from cpflare.parallel.topology import build_topology
from cpflare.train.checkpoint import find_checkpoint, load_checkpoint
from cpflare.train.loop import Trainer
from data_prep.fields import load_field_map
from data_prep.read import load_case
from support.stores import SMALL, train_rank, write_store
from support.surfaces import ENCODINGS, cube

CASES = int(os.environ.get("CPFLARE_FUZZ_CASES", "1000"))
"""Mutations of each kind; the figure in the environment is for longer searches."""

LONGEST_S = 10.0
"""What one case may take on a busy machine; most take a few milliseconds."""

MEMORY = 2 << 30
"""Address space beside what the process starts with: a header's size must not be believed."""

SIZES = {"run_1": 60, "run_2": 57, "run_3": 28}
SPLITS = {"train": ["run_1", "run_2"], "val": ["run_3"], "test": []}
ODD = [
    *(None, True, -1, 0, 1, 2**31, 10**15, 10**30, -(2**63), 0.5, 1e308, float("nan")),
    *("", "0", "x" * 300, "../../../../etc/passwd", "/etc", "\0", "run_1", [], {}, [[]], {"a": 1}),
]
"""What JSON may hold where something else is expected."""


# ---- mutations --------------------------------------------------------------------------------


def mutate_bytes(data: bytes, rng: np.random.Generator) -> bytes:
    kind = rng.integers(6)
    at = int(rng.integers(len(data) + 1))
    length = int(rng.integers(1, 40))
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + rng.bytes(length) + data[at:]
    if kind == 2:
        return data[:at] + data[at + length :]
    if kind == 3:
        return data[:at] + rng.bytes(length) + data[at + length :]
    if kind == 4:
        return data[:at] + data[at : at + length] * 3 + data[at + length :]
    return mutate_number(data, rng)


def mutate_number(data: bytes, rng: np.random.Generator) -> bytes:
    """Change a number of a text."""
    found = list(re.finditer(rb"\d+", data))
    if not found:
        return data[:-1]
    match = found[rng.integers(len(found))]
    odd = [b"0", b"-1", b"1", b"999999999999", b"4294967295", b"18446744073709551616", b"", b"1e9"]
    return data[: match.start()] + odd[rng.integers(len(odd))] + data[match.end() :]


def mutate_json(value, rng: np.random.Generator):
    """Replace, add or take away one thing somewhere in nested values."""
    if isinstance(value, dict) and value and rng.random() > 0.15:
        key = list(value)[rng.integers(len(value))]
        if rng.random() < 0.15:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: mutate_json(value[key], rng)}
    if isinstance(value, list) and value and rng.random() > 0.3:
        index = int(rng.integers(len(value)))
        return [*value[:index], mutate_json(value[index], rng), *value[index + 1 :]]
    return ODD[rng.integers(len(ODD))]


def mutate_file(path: Path, data: bytes, rng: np.random.Generator) -> None:
    if path.suffix == ".json" and rng.random() < 0.75:
        path.write_text(json.dumps(mutate_json(json.loads(data), rng)))
    else:
        path.write_bytes(mutate_bytes(data, rng))


# ---- the loop, in a process of its own --------------------------------------------------------


def search(make, folder, cases=CASES):
    """Run `attempt(rng)` of `make(folder)` on many seeds in a child process."""
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    process = context.Process(target=_search, args=(there, make, folder, cases), daemon=True)
    process.start()
    there.close()
    last, counts = -1, {}
    while True:
        try:
            assert here.poll(LONGEST_S + 60), f"seed {last + 1}: it hangs"
            kind, seed, text = here.recv()
        except (EOFError, ConnectionResetError):
            process.join()
            pytest.fail(f"seed {last + 1}: the process ended with {process.exitcode}")
        if kind == "done":
            break
        last = seed
        counts[kind] = counts.get(kind, 0) + 1
        if kind == "wrong":
            process.kill()
            pytest.fail(f"seed {seed}:\n{text}")
    process.join()
    assert sum(counts.values()) == cases
    # Most mutations do harm, and some do none.
    assert counts.get("refused", 0) > cases / 10, counts
    return counts


def _search(connection, make, folder, cases):
    attempt = make(Path(folder))
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    signal.signal(signal.SIGALRM, _too_long)
    warnings.simplefilter("ignore")
    for seed in range(cases):
        # Sent before it is tried, so that the parent knows which one took the process along.
        signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
        try:
            attempt(np.random.default_rng([11, seed]))
            outcome = ("passed", seed, "")
        except CpflareError as error:
            outcome = judge(seed, error)
        except BaseException:
            outcome = ("wrong", seed, traceback.format_exc())
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send(outcome)
    connection.send(("done", cases, ""))


def judge(seed, error):
    """An error is clear if it is one line; and if it took no memory that is not there."""
    cause = error
    while cause is not None:
        if isinstance(cause, MemoryError) or re.search("allocate memory|bad_alloc", str(cause)):
            return ("wrong", seed, f"memory was asked for: {error}")
        cause = cause.__cause__ or cause.__context__
    if "\n" in str(error) or not str(error) or len(str(error)) > 2000:
        return ("wrong", seed, f"no clear line: {error}")
    return ("refused", seed, "")


def _too_long(*_):
    raise TimeoutError(f"more than {LONGEST_S} s")


# ---- stores -----------------------------------------------------------------------------------


def make_store_attempt(folder):
    files = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    metadata = [path for path in files if path.name in ("zarr.json", "cpflare.json")]
    chunks = [path for path in files if path not in metadata]

    def attempt(rng):
        kind = metadata if rng.random() < 0.8 else chunks
        path = kind[rng.integers(len(kind))]
        try:
            mutate_file(path, files[path], rng)
            use_store(folder)
        finally:
            path.write_bytes(files[path])

    return attempt


def use_store(path):
    store = Store.open(path)
    assert all(name in store.cases for cases in store.splits.values() for name in cases)
    assert store.identity is not None
    assert store.statistics is not None
    assert store.field_map is not None
    for name in store.cases:
        assert (path / name).resolve().parent == path.resolve()
        case = store.case(name)
        assert case.num_rows == store.rows[name]
        values = case.read(slice(0, 10))
        assert all(np.isfinite(array).all() for array in values.values())
        case.read()


@pytest.mark.slow
def test_mutated_stores_are_refused_or_read(tmp_path):
    write_store(tmp_path / "store", SIZES, SPLITS)
    search(make_store_attempt, tmp_path / "store")


# ---- meshes -----------------------------------------------------------------------------------


def make_mesh_attempt(folder):
    files = {path: path.read_bytes() for path in sorted(folder.glob("*.vtp"))}
    field_map = load_field_map("drivaerml")

    def attempt(rng):
        path = list(files)[rng.integers(len(files))]
        data = files[path]
        header = data.find(b"<AppendedData")
        mutated = folder / "mutated.vtp"
        if rng.random() < 0.5:
            # Numbers of the header: counts, offsets, sizes.
            end = header if header > 0 else len(data)
            mutated.write_bytes(mutate_number(data[:end], rng) + data[end:])
        else:
            mutated.write_bytes(mutate_bytes(data, rng))
        case = load_case(mutated, field_map)
        assert all(len(values) == case.num_rows for values in case.fields.values())

    return attempt


@pytest.mark.slow
def test_mutated_meshes_are_refused_or_read(tmp_path):
    for name, encoding in ENCODINGS.items():
        cube().write(tmp_path / f"{name}.vtp", **encoding)
    search(make_mesh_attempt, tmp_path)


# ---- checkpoints ------------------------------------------------------------------------------


def overrides_of(folder):
    more = ("train.steps=2", "train.cases_per_step=1", "data.tokens=20", "train.ema=0.9")
    return [f"data.store={folder}/store", f"run.dir={folder}/run", *SMALL, *more]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    write_store(folder / "store", SIZES, SPLITS)
    train_rank(0, 1, overrides_of(folder))
    return folder


def make_checkpoint_attempt(folder):
    config = load_config(None, overrides_of(folder))
    topology = build_topology(config.parallel, torch.device("cpu"))
    trainer = Trainer(config, Store.open(config.data.store), topology)
    path = folder / "run" / "checkpoints" / "step_00000002"
    files = {file: file.read_bytes() for file in sorted(path.iterdir())}

    def attempt(rng):
        file = list(files)[rng.integers(len(files))]
        try:
            mutate_file(file, files[file], rng)
            if file.name != "state.json" and rng.random() < 0.9:
                sign(path)  # so that the file itself is read
            found, _ = find_checkpoint(path.parent)
            if found is None:
                raise DataError("damaged")
            trainer._load(found)
            assert trainer.progress.step >= 0
        finally:
            file.write_bytes(files[file])
            (path / "state.json").write_bytes(files[path / "state.json"])

    return attempt


def sign(path):
    """Make the checksums fit again."""
    import hashlib

    state = json.loads((path / "state.json").read_text())
    for name in state["checksums"]:
        state["checksums"][name] = hashlib.sha256((path / name).read_bytes()).hexdigest()
    (path / "state.json").write_text(json.dumps(state))


@pytest.mark.slow
def test_mutated_checkpoints_are_refused_or_loaded(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "copy")
    # The paths of the configuration are those of the copy.
    search(make_checkpoint_attempt, tmp_path / "copy")


class Payload:
    """What pickle executes on loading."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (os.mkdir, (str(self.mark),))


def test_a_checkpoint_cannot_bring_code_along(trained, tmp_path):
    path = tmp_path / "step_00000002"
    shutil.copytree(trained / "run" / "checkpoints" / path.name, path)
    mark = tmp_path / "executed"
    for write in (
        lambda file: torch.save({"optimizer": Payload(mark)}, file),
        lambda file: torch.save(
            {"optimizer": Payload(mark)}, file, _use_new_zipfile_serialization=False
        ),
        lambda file: Path(file).write_bytes(pickle.dumps(Payload(mark))),
    ):
        write(path / "optimizer.pt")
        sign(path)
        with pytest.raises(DataError, match=r"step_00000002 cannot be read"):
            load_checkpoint(path, torch.device("cpu"))
        assert not mark.exists()


def test_a_compressed_checkpoint_is_not_unpacked(trained, tmp_path):
    """A few kilobytes that would become a gigabyte."""
    import zipfile

    path = tmp_path / "step_00000002"
    shutil.copytree(trained / "run" / "checkpoints" / path.name, path)
    with zipfile.ZipFile(path / "optimizer.pt") as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path / "optimizer.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    sign(path)
    since = time.monotonic()
    with pytest.raises(DataError, match="compressed"):
        load_checkpoint(path, torch.device("cpu"))
    assert time.monotonic() - since < LONGEST_S


def test_every_tensor_file_loads_with_weights_only(trained):
    for path in (trained / "run" / "checkpoints").rglob("*.pt"):
        assert torch.load(path, weights_only=True).keys() >= {"optimizer", "schedule"}
