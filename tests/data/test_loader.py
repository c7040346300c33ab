"""Reading: a rank reads its own rows and no others, one step ahead of the training."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import zarr.storage

from cpflare.config import config_from_dict
from cpflare.data import store_writer
from cpflare.data.loader import ShardReader, prefetch
from cpflare.data.normalize import Normalizer
from cpflare.data.sampler import Sampler, Window
from cpflare.data.store import Store
from cpflare.errors import DataError
from support.stores import SIZES, write_store

CHUNK = 16  # rows of an inner chunk in these tests, so that a case of 157 rows has several
ROW_BYTES = 4 * (3 + 3 + 1 + 3)  # position, normal, pressure and wall shear in float32
WINDOWS = [
    Window("run_2", 30, 70, 157),
    Window("run_2", 120, 90, 157),  # wraps
    Window("run_1", 0, 101, 101),
    Window("run_5", 0, 2, 2),  # fewer rows than ranks
    Window("run_1", 100, 1, 101),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("loader") / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_writer, "CHUNK_ROWS", CHUNK)
        store = write_store(path)
    assert store.case("run_2").chunk_rows() <= CHUNK
    return path


class CountingStore(zarr.storage.WrapperStore):
    """Passes reads on to a store, and keeps which keys and how many bytes were asked for."""

    def __init__(self, store):
        super().__init__(store)
        self.bytes = {}

    async def get(self, key, prototype, byte_range=None):
        value = await super().get(key, prototype, byte_range)
        if value is not None:
            self.bytes[key] = self.bytes.get(key, 0) + len(value)
        return value

    async def get_partial_values(self, prototype, key_ranges):
        key_ranges = list(key_ranges)
        values = await super().get_partial_values(prototype, key_ranges)
        for (key, _), value in zip(key_ranges, values, strict=True):
            self.bytes[key] = self.bytes.get(key, 0) + len(value or b"")
        return values

    def of_chunks(self):
        """Bytes of the arrays' values, by array."""
        totals = {}
        for key, count in self.bytes.items():
            case, field, *rest = key.split("/")
            if rest and rest[0] == "c":
                totals[f"{case}/{field}"] = totals.get(f"{case}/{field}", 0) + count
        return totals


def normalizer(store, **data):
    return Normalizer.from_statistics(config_from_dict({"data": data}), store.statistics)


def reader(folder, cp=1, cp_rank=0, dtype=torch.float64, **data):
    store = Store.open(folder)
    return ShardReader(store, normalizer(store, **data), dtype, cp, cp_rank)


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
@pytest.mark.parametrize("window", WINDOWS, ids=lambda w: f"{w.case}[{w.start}+{w.size}]")
def test_the_ranks_shards_are_the_window(folder, window, cp):
    parts = [reader(folder, cp, rank).read(window) for rank in range(cp)]
    store = Store.open(folder)
    rows = (window.start + np.arange(window.size)) % window.num_rows
    whole = {name: a[rows] for name, a in store.case(window.case).read(centred=True).items()}
    scale = normalizer(store)
    offset = store.case(window.case).offset
    # The same arithmetic on the same numbers, however they were cut: bitwise.
    inputs = torch.cat([part.inputs for part in parts])
    assert torch.equal(inputs, scale.encode_inputs(whole, offset, torch.float64))
    targets = torch.cat([part.targets for part in parts])
    assert torch.equal(targets, scale.encode_targets(whole, torch.float64))
    assert torch.cat([part.rows for part in parts]).tolist() == rows.tolist()
    sizes = window.shard_sizes(cp)
    assert [len(part.inputs) for part in parts] == sizes
    assert [(part.inputs.shape[1], part.targets.shape[1]) for part in parts] == [(6, 4)] * cp


def test_an_empty_shard_has_the_shapes_and_types_of_a_full_one(folder):
    empty = reader(folder, 3, 2, torch.float32).read(Window("run_5", 0, 2, 2))
    assert (empty.inputs.shape, empty.targets.shape, empty.rows.shape) == ((0, 6), (0, 4), (0,))
    assert (empty.inputs.dtype, empty.rows.dtype) == (torch.float32, torch.int64)


@pytest.mark.parametrize("window", WINDOWS[:2], ids=["inside", "wrapped"])
def test_a_rank_reads_its_own_rows_only(folder, window):
    cp, totals = 3, []
    for rank in range(cp):
        counting = CountingStore(zarr.storage.LocalStore(folder, read_only=True))
        store = Store.open(folder, storage=counting)
        shards = ShardReader(store, normalizer(store), torch.float32, cp, rank)
        num_rows = len(shards.read(window).inputs)
        read = counting.of_chunks()
        wanted = {"position", "normal", "pressure", "wall_shear"}
        assert read.keys() == {f"{window.case}/{field}" for field in wanted}
        # Each end of a range may lie within a chunk; a wrapped shard has two ranges. The index of
        # a shard (16 bytes a chunk and a checksum) comes with each of the 4 arrays' ranges.
        chunks = -(-157 // CHUNK)
        ranges = len(window.shard(cp, rank))
        extra = ranges * (2 * (CHUNK - 1) * ROW_BYTES + 4 * (16 * chunks + 4 + 2 * 4 * chunks))
        assert num_rows * ROW_BYTES <= sum(read.values()) <= num_rows * ROW_BYTES + extra
        totals.append(sum(read.values()))
    whole = 157 * ROW_BYTES
    assert max(totals) < 0.75 * whole


def test_only_the_fields_that_the_model_reads_are_read(folder):
    counting = CountingStore(zarr.storage.LocalStore(folder, read_only=True))
    store = Store.open(folder, storage=counting)
    scale = normalizer(store, inputs=["position"], targets=["pressure"])
    sample = ShardReader(store, scale, torch.float32, 1, 0).read(WINDOWS[0])
    assert (sample.inputs.shape, sample.targets.shape) == ((70, 3), (70, 1))
    assert counting.of_chunks().keys() == {"run_2/position", "run_2/pressure"}


def sampler(per_step=2):
    cases = list(SIZES)
    return Sampler(cases, [SIZES[case] for case in cases], 40, per_step, 0)


def same(a, b):
    return a.window == b.window and all(
        torch.equal(getattr(a, name), getattr(b, name)) for name in ("inputs", "targets", "rows")
    )


def test_prefetching_gives_what_direct_reading_gives(folder):
    read, drawn = reader(folder, 2, 1).read, sampler()
    steps = list(prefetch(read, drawn, 3, 9, 1, 0))
    assert [step.number for step in steps] == list(range(3, 9))
    for step in steps:
        windows = drawn.windows(step.number)
        assert list(step.windows) == windows
        assert all(same(s, read(w)) for s, w in zip(step.samples, windows, strict=True))
        assert step.wait_s >= 0


def test_replicas_share_a_steps_windows_in_order(folder):
    read, drawn = reader(folder).read, sampler(per_step=4)
    replicas = [list(prefetch(read, drawn, 0, 4, 2, dp_rank)) for dp_rank in range(2)]
    for number, steps in enumerate(zip(*replicas, strict=True)):
        taken = [sample.window for step in steps for sample in step.samples]
        assert taken == drawn.windows(number)
        assert [len(step.samples) for step in steps] == [2, 2]
        assert all(list(step.windows) == drawn.windows(number) for step in steps)


def test_no_steps_are_no_reading():
    assert list(prefetch(fail, sampler(), 5, 5, 1, 0)) == []


def fail(window):
    raise AssertionError(f"{window} was read")


def test_one_step_is_read_ahead_and_no_more():
    drawn, read_of = sampler(per_step=1), {step: threading.Event() for step in range(6)}
    number_of = {drawn.windows(step)[0]: step for step in range(6)}
    assert len(number_of) == 6
    threads = set()

    def read(window):
        threads.add(threading.get_ident())
        read_of[number_of[window]].set()
        return window

    steps = prefetch(read, drawn, 0, 6, 1, 0)
    for number in range(5):
        assert next(steps).number == number
        # The next step is read while this one is trained: nobody asks for it here.
        assert read_of[number + 1].wait(timeout=20)
        assert not any(read_of[later].is_set() for later in range(number + 2, 6))
    steps.close()
    assert threading.get_ident() not in threads


def test_an_error_of_the_reading_thread_is_raised_at_its_step():
    drawn = sampler(per_step=1)
    bad = drawn.windows(2)[0]

    def read(window):
        if window == bad:
            raise DataError(f"case {window.case} is damaged")
        return window

    steps = prefetch(read, drawn, 0, 6, 1, 0)
    assert [next(steps).number, next(steps).number] == [0, 1]
    with pytest.raises(DataError, match=f"case {bad.case} is damaged"):
        next(steps)
    assert list(steps) == []


def test_an_abandoned_iteration_ends_its_thread():
    before = threading.active_count()
    steps = prefetch(lambda window: window, sampler(), 0, 6, 1, 0)
    next(steps)
    assert threading.active_count() > before
    steps.close()
    assert threading.active_count() == before


def test_readers_of_several_threads_get_the_same(folder):
    own = reader(folder)
    expected = [own.read(window) for window in WINDOWS]
    fresh = reader(folder)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(fresh.read, WINDOWS * 4))
    assert all(same(a, b) for a, b in zip(found, expected * 4, strict=True))


def test_a_damaged_chunk_is_named_at_its_step(folder, tmp_path):
    import shutil

    copy = tmp_path / "store"
    shutil.copytree(folder, copy)
    (file,) = (copy / "run_1" / "pressure" / "c").iterdir()
    data = bytearray(file.read_bytes())
    data[8] ^= 0xFF
    file.write_bytes(data)
    with pytest.raises(DataError, match=r"run_1.*pressure.*chunk"):
        reader(copy).read(Window("run_1", 0, 101, 101))
