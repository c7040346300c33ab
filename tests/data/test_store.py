"""The store: rows, order, chunks touched, damage, statistics, completion."""

from __future__ import annotations

import asyncio
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import zarr
from zarr.storage import LocalStore, WrapperStore

from cpflare.data import Store
from cpflare.data.statistics import Moments, Statistics
from cpflare.data.store import MARK, natural_order
from cpflare.data.store_writer import (
    ASIDE,
    CHUNK_ROWS,
    SHARD_CHUNKS,
    StoreWriter,
    chunk_layout,
    row_order,
)
from cpflare.data.verify import inspect_store
from cpflare.errors import DataError

OFFSET = np.array([100.0, -2.0, 0.5])
ATTRS = {"notices": [], "source": "run_1/boundary_1.vtp", "source_size": 1, "shear_sign": -1}


def fields(num_rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """A sphere's worth of consistent fields; the pressure is the row's number."""
    rng = np.random.default_rng(seed)
    normal = rng.normal(size=(num_rows, 3))
    normal /= np.linalg.norm(normal, axis=1, keepdims=True)
    area = rng.uniform(0.5, 1.0, num_rows)
    return {
        "position": normal + OFFSET,
        "normal": normal,
        "area": area,
        "area_vector": normal * area[:, None],
        "pressure": np.arange(num_rows, dtype=np.float32),
        "wall_shear": rng.normal(size=(num_rows, 3)),
    }


def write(path, cases: dict[str, dict[str, np.ndarray]], *, threads: int = 1, train=None) -> Store:
    writer = StoreWriter(path, "drivaerml", {"name": "drivaerml"}, seed=3)
    writer.begin()
    whole = {
        name: writer.write_case(
            name, values, association="cell", offset=OFFSET, attrs=ATTRS, threads=threads
        )
        for name, values in cases.items()
    }
    names = list(cases)
    train = train or names[:1]
    rest = [n for n in names if n not in train]
    writer.finish(whole, {"train": train, "val": rest, "test": []})
    return Store.open(path)


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """A case of several shards, opened through a store that counts what is read."""
    num_rows = 2 * CHUNK_ROWS * SHARD_CHUNKS + 12_345
    path = tmp_path_factory.mktemp("big") / "store"
    some = fields(num_rows)
    write(path, {"run_1": {k: some[k] for k in ("position", "pressure")}})
    return path, some


class CountingStore(WrapperStore):
    """Counts bytes and requests for array data."""

    def __init__(self, store):
        super().__init__(store)
        self.ranges: list[tuple[str, object]] = []

    async def get(self, key, prototype, byte_range=None):
        self.ranges.append((key, byte_range))
        return await super().get(key, prototype, byte_range)


def test_rows_come_back_by_their_source_number(tmp_path):
    source = fields(1000)
    case = write(tmp_path / "s", {"run_1": source}).case("run_1")
    rows = case.read()
    back = np.argsort(rows["cell_id"])
    assert case.num_rows == 1000
    assert case.fields == (*source, "cell_id")
    np.testing.assert_array_equal(rows["cell_id"][back], np.arange(1000))
    np.testing.assert_array_equal(rows["pressure"], rows["cell_id"])
    # float32 about the centre: 2⁻²⁴ of a unit sphere
    np.testing.assert_allclose(rows["position"][back], source["position"], atol=6e-8)
    np.testing.assert_array_equal(rows["area_vector"][back], source["area_vector"])
    np.testing.assert_array_equal(rows["area"][back], source["area"])
    assert rows["position"].dtype == np.float64
    assert rows["area"].dtype == np.float64
    assert rows["normal"].dtype == np.float32


def test_centred_positions_are_the_stored_ones(tmp_path):
    case = write(tmp_path / "s", {"run_1": fields(100)}).case("run_1")
    stored = case.read(slice(10, 30), ["position"], centred=True)["position"]
    assert stored.dtype == np.float32
    absolute = case.read(slice(10, 30), ["position"])["position"]
    np.testing.assert_array_equal(absolute, stored.astype(np.float64) + case.offset)


def test_the_order_depends_on_seed_and_name_alone():
    np.testing.assert_array_equal(row_order(0, "run_1", 500), row_order(0, "run_1", 500))
    assert (row_order(0, "run_1", 500) != row_order(1, "run_1", 500)).any()
    assert (row_order(0, "run_1", 500) != row_order(0, "run_2", 500)).any()
    assert sorted(row_order(0, "run_1", 500)) == list(range(500))


def test_windows_are_uniform_samples():
    order = row_order(0, "run_1", 100_000)
    window = order[20_000:30_000]
    # ten equal parts of the source: 1,000 each, with a deviation of 28
    assert np.abs(np.histogram(window, 10, (0, 100_000))[0] - 1000).max() < 150


def test_threads_and_repetition_give_the_same_bytes(tmp_path):
    one = write(tmp_path / "a", {"run_1": fields(40_000)}, threads=1)
    two = write(tmp_path / "b", {"run_1": fields(40_000)}, threads=3)
    assert one.identity == two.identity
    files = sorted(p.relative_to(one.path) for p in one.path.rglob("*") if p.is_file())
    assert files == sorted(p.relative_to(two.path) for p in two.path.rglob("*") if p.is_file())
    for file in files:
        assert (one.path / file).read_bytes() == (two.path / file).read_bytes(), file


@pytest.mark.parametrize("num_rows", [1, 100, CHUNK_ROWS, CHUNK_ROWS + 1, 8_600_000])
def test_chunks_are_small_and_even_and_files_are_few(num_rows):
    chunk, shard = chunk_layout(num_rows)
    assert chunk <= CHUNK_ROWS
    assert shard % chunk == 0
    assert shard <= CHUNK_ROWS * SHARD_CHUNKS
    padded = -(-num_rows // chunk) * chunk
    assert padded - num_rows < chunk / 2 + 1 or num_rows < CHUNK_ROWS
    assert 7 * -(-num_rows // shard) < 100


@pytest.mark.slow
@pytest.mark.parametrize("start", [0, 12_345, CHUNK_ROWS * SHARD_CHUNKS - 50_000])
def test_a_read_decodes_the_chunks_of_its_slice_only(big, start):
    path, source = big
    counting = CountingStore(LocalStore(path, read_only=True))
    case = Store.open(path, storage=counting).case("run_1")
    case.read(slice(0, 1), centred=True)  # metadata
    counting.ranges.clear()
    rows = slice(start, start + 100_000)
    values = case.read(rows, ["position", "pressure"], centred=True)
    order = row_order(3, "run_1", len(source["pressure"]))[rows]
    np.testing.assert_array_equal(values["pressure"], order)
    chunk = case.chunk_rows()
    data = [r for r in counting.ranges if r[1] is not None and "c/" in r[0]]
    whole = [r for r in counting.ranges if r[1] is None and "c/" in r[0]]
    assert not whole, "a whole shard was read"
    lengths = [r[1].end - r[1].start for r in data if hasattr(r[1], "end")]
    decoded = sum(lengths) / (12 + 4)  # bytes a row of the two fields
    assert chunk <= CHUNK_ROWS
    assert 100_000 <= decoded <= 100_000 + 2 * chunk + 100


def test_the_ranks_of_a_whole_surface_read_each_row_once(big):
    path, _ = big
    case = Store.open(path).case("run_1")
    cuts = np.linspace(0, case.num_rows, 4).astype(int)
    parts = [case.read(slice(a, b), ["cell_id"])["cell_id"] for a, b in pairwise(cuts)]
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(case.num_rows))


@pytest.mark.slow
def test_reads_from_threads_agree(big):
    path, _ = big
    case = Store.open(path).case("run_1")
    slices = [slice(i * 70_000, i * 70_000 + 90_000) for i in range(8)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda s: case.read(s, ["pressure"])["pressure"], slices))
    for s, values in zip(slices, found, strict=True):
        np.testing.assert_array_equal(values, row_order(3, "run_1", case.num_rows)[s])


def test_slices_and_names_that_cannot_be_read(tmp_path):
    case = write(tmp_path / "s", {"run_1": fields(100)}).case("run_1")
    assert len(case.read(slice(40, 40))["pressure"]) == 0
    assert case.read(slice(50, 40), ["position"])["position"].shape == (0, 3)
    assert len(case.read(slice(90, 1000), ["pressure"])["pressure"]) == 10
    with pytest.raises(DataError, match="step 2"):
        case.read(slice(0, 10, 2))
    with pytest.raises(DataError, match="has no field temperature; it has position, normal"):
        case.read(slice(0, 10), ["temperature"])


def test_names_splits_and_cases(tmp_path):
    store = write(tmp_path / "s", {f"run_{i}": fields(10, i) for i in (10, 2, 1)}, train=["run_2"])
    assert store.cases == ("run_1", "run_2", "run_10")
    assert natural_order(["b_10_1", "b_9_2", "a"]) == ["a", "b_9_2", "b_10_1"]
    assert store.split("val") == ("run_1", "run_10")
    assert store.rows == {"run_1": 10, "run_2": 10, "run_10": 10}
    with pytest.raises(DataError, match=r"split=tset is unknown.*train, val, test"):
        store.split("tset")
    with pytest.raises(DataError, match=r"case=run_11 is not in store.*did you mean run_1"):
        store.case("run_11")


# -- completion ------------------------------------------------------------------------------------


def test_stores_that_cannot_be_opened_say_why(tmp_path):
    path = tmp_path / "s"
    with pytest.raises(DataError, match=r"does not exist; make it with `cpflare prep"):
        Store.open(path)
    write(path, {"run_1": fields(10)})
    mark = json.loads((path / MARK).read_text())
    (path / MARK).unlink()
    with pytest.raises(DataError, match="is incomplete"):
        Store.open(path)
    (path / MARK).write_text("{")
    with pytest.raises(DataError, match="is damaged"):
        Store.open(path)
    (path / MARK).write_text(json.dumps({**mark, "schema": 99}))
    with pytest.raises(DataError, match="has schema 99, this version reads"):
        Store.open(path)
    (path / MARK).write_text(json.dumps(mark))
    shutil.rmtree(path / "run_1")
    with pytest.raises(DataError, match="case run_1 is missing"):
        Store.open(path)


def test_a_case_that_was_not_ended_is_no_case(tmp_path):
    path = tmp_path / "s"
    writer = StoreWriter(path, "drivaerml", {}, 0)
    writer.begin()
    broken = fields(10)
    broken["pressure"][3] = np.nan
    with pytest.raises(DataError, match="case run_1: field pressure is not finite at source row 3"):
        writer.write_case("run_1", broken, association="cell", offset=OFFSET, attrs=ATTRS)
    assert writer.whole_cases() == {}
    assert (path / ASIDE).exists()
    writer.begin()
    assert not (path / ASIDE).exists()


def test_the_writer_refuses_rows_that_do_not_fit(tmp_path):
    writer = StoreWriter(tmp_path / "s", "drivaerml", {}, 0)
    writer.begin()
    some = fields(10)
    some["pressure"] = some["pressure"][:9]
    with pytest.raises(DataError, match="field pressure has 9 rows, position has 10"):
        writer.write_case("run_1", some, association="cell", offset=OFFSET, attrs=ATTRS)
    with pytest.raises(DataError, match="has no rows"):
        writer.write_case("run_1", fields(0), association="cell", offset=OFFSET, attrs=ATTRS)


def test_folders_of_others_and_stores_of_another_kind_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="is no cpflare store"):
        StoreWriter(tmp_path, "drivaerml", {}, 0).check()
    write(tmp_path / "s", {"run_1": fields(10)})
    with pytest.raises(DataError, match="another seed 3, now 4"):
        StoreWriter(tmp_path / "s", "drivaerml", {"name": "drivaerml"}, 4).check()
    with pytest.raises(DataError, match="another field_map"):
        StoreWriter(tmp_path / "s", "drivaerml", {"name": "x"}, 3).check()


# -- damage ----------------------------------------------------------------------------------------


def test_a_whole_store_verifies_and_zeros_are_no_damage(tmp_path):
    some = fields(1000)
    some["pressure"][:] = 0
    some["wall_shear"][:] = 0
    write(tmp_path / "s", {"run_1": some, "run_2": fields(50, 1)})
    report = inspect_store(tmp_path / "s", verify=True)
    assert report.ok, report.problems
    text = report.text()
    assert "no damage found; every chunk was read" in text
    assert "run_1: 1,000 cells, train" in text


FIELDS = [*fields(1), "cell_id"]


@pytest.mark.parametrize("field", FIELDS)
def test_a_deleted_chunk_is_found_and_named(tmp_path, field):
    store = write(tmp_path / "s", {"run_1": fields(1000)})
    next(p for p in (store.path / "run_1" / field / "c").rglob("*") if p.is_file()).unlink()
    with pytest.raises(DataError, match=f"case run_1, array {field}, chunk 0 .*is missing"):
        Store.open(store.path).case("run_1").read()
    (problem,) = inspect_store(store.path, verify=True).problems
    assert f"case run_1, array {field}, chunk 0" in problem
    assert f"delete {store.path / 'run_1'} and run `cpflare prep" in problem


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("kind", ["flip", "cut", "index"])
def test_damaged_bytes_are_found_and_named(tmp_path, field, kind):
    store = write(tmp_path / "s", {"run_1": fields(1000)})
    file = next(p for p in (store.path / "run_1" / field / "c").rglob("*") if p.is_file())
    data = bytearray(file.read_bytes())
    if kind == "cut":
        data = data[: len(data) // 2]
    else:
        data[-6 if kind == "index" else 100] ^= 0x40
    file.write_bytes(data)
    with pytest.raises(DataError, match=f"case run_1, array {field}"):
        Store.open(store.path).case("run_1").read(slice(0, 1000), [field])
    (problem,) = inspect_store(store.path, verify=True).problems
    assert f"case run_1, array {field}" in problem


def test_the_damaged_chunk_among_many_is_the_one_that_is_named(big, tmp_path):
    path = shutil.copytree(big[0], tmp_path / "s")
    case = Store.open(path).case("run_1")
    chunk = case.chunk_rows("pressure")
    file = path / "run_1" / "pressure" / "c" / "1"
    data = bytearray(file.read_bytes())
    data[chunk * 4 * 3 + 50] ^= 1  # in the fourth chunk of the second file
    file.write_bytes(data)
    number = case.shard_rows("pressure") // chunk + 3
    with pytest.raises(DataError, match=f"array pressure, chunk {number} .rows .*, file c/1"):
        case.read(None, ["pressure"])
    case.read(slice(0, number * chunk), ["pressure"])  # what stands before is still there
    (problem,) = inspect_store(path, verify=True).problems
    assert f"chunk {number} " in problem


def rewrite(path, field, change):
    """Change an array through zarr, so that the chunks' own checksums fit."""
    array = zarr.open_array(path / "run_1" / field, mode="r+")
    values = array[:]
    change(values)
    array[:] = values


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("pressure", lambda v: v.__setitem__(3, 7.5), "checksum differs"),
        ("cell_id", lambda v: v.__setitem__(3, v[4]), "1 source rows are missing"),
        ("wall_shear", lambda v: v.__setitem__(slice(None), 0), "statistics are not those"),
    ],
)
def test_changed_values_are_found(tmp_path, field, change, message):
    store = write(tmp_path / "s", {"run_1": fields(1000)})
    rewrite(store.path, field, change)
    assert any(message in p for p in inspect_store(store.path, verify=True).problems)


def test_areas_and_normals_that_contradict_each_other_are_found(tmp_path):
    some = fields(1000)
    some["area_vector"][17] *= -1
    write(tmp_path / "s", {"run_1": some})
    (problem,) = inspect_store(tmp_path / "s", verify=True).problems
    assert "contradict each other in 1 rows" in problem


def test_a_changed_mark_is_found(tmp_path):
    store = write(tmp_path / "s", {"run_1": fields(10), "run_2": fields(10, 1)})
    mark = json.loads((store.path / MARK).read_text())
    mark["statistics"]["pressure"]["mean"] = [3.0]
    (store.path / MARK).write_text(json.dumps(mark))
    with pytest.raises(DataError, match="do not fit their hash"):
        _ = Store.open(store.path).statistics
    mark = json.loads((store.path / MARK).read_text()) | {"splits": {"train": ["run_2"]}}
    mark["statistics"] = store.statistics.to_dict()
    (store.path / MARK).write_text(json.dumps(mark))
    assert "not those of the training cases" in inspect_store(store.path).problems[0]


# -- statistics ------------------------------------------------------------------------------------


def test_statistics_are_those_of_the_training_rows(tmp_path):
    cases = {f"run_{i}": fields(50_000 + i, i) for i in (1, 2, 3)}
    store = write(tmp_path / "s", cases, train=["run_1", "run_3"])
    stats = store.statistics.fields
    rows = {n: store.case(n).read() for n in ("run_1", "run_3")}
    for name in ("position", "normal", "pressure", "wall_shear"):
        values = np.concatenate([r[name] for r in rows.values()]).astype(np.float64)
        values = values.reshape(len(values), -1)
        found = stats[name]
        assert found.count == len(values) == 100_004
        # float64 means of 1e5 values, merged in another order
        np.testing.assert_allclose(found.mean, values.mean(0), rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(found.std, values.std(0), rtol=1e-11)
        np.testing.assert_array_equal(found.min, values.min(0))
        np.testing.assert_array_equal(found.max, values.max(0))
    relative = stats["position_relative"]
    np.testing.assert_allclose(stats["position"].mean - OFFSET, relative.mean, atol=1e-13)
    np.testing.assert_array_equal(stats["position"].std, relative.std)
    assert set(stats) == {"position", "position_relative", "normal", "pressure", "wall_shear"}


def test_statistics_of_large_values_keep_their_digits():
    values = 1e8 + np.random.default_rng(0).normal(size=400_000)
    before = values.copy()
    moments = Moments.of(values)
    np.testing.assert_array_equal(values, before)
    assert np.sqrt(moments.m2 / moments.count)[0] == pytest.approx(values.std(), rel=1e-9)


def test_constant_channels_get_a_floor():
    values = np.stack([np.full(10, 5.0), np.zeros(10), np.arange(10.0)], axis=1)
    found = Statistics.merge([{"x": Moments.of(values)}]).fields["x"]
    np.testing.assert_allclose(found.std[:2], [5.0, 1.0])
    assert found.std[2] == pytest.approx(values[:, 2].std())


def test_statistics_come_back_from_their_dictionary_with_their_hash():
    stats = Statistics.merge([{"p": Moments.of(np.random.default_rng(0).normal(size=100))}])
    again = Statistics.from_dict(json.loads(json.dumps(stats.to_dict())))
    assert again.hash == stats.hash
    other = Statistics.merge([{"p": Moments.of(np.random.default_rng(1).normal(size=100))}])
    assert other.hash != stats.hash


def test_reading_within_a_running_event_loop_is_possible_in_a_thread(tmp_path):
    case = write(tmp_path / "s", {"run_1": fields(100)}).case("run_1")

    async def read():
        return await asyncio.to_thread(case.read, slice(0, 10))

    assert len(asyncio.run(read())["pressure"]) == 10
