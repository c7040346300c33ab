"""Studies: what is measured is what happens, and what is reported follows from the raw samples."""

import csv
import dataclasses
import io
import json
import mmap
import platform
import time

import numpy as np
import pytest
import torch

from benchmarks import compare_peers
from cpflare.cli import scaling
from cpflare.errors import ConfigError, DataError
from cpflare.parallel.topology import build_topology
from cpflare.scaling.efficiency import summarise
from cpflare.scaling.grid import grid, points_of, read_study_file
from cpflare.scaling.machine import cpu_name, describe_machine
from cpflare.scaling.measure import MemoryMeter, StepMeter, record, synthetic_steps
from cpflare.scaling.plots import to_html, write_study
from cpflare.scaling.protocol import Protocol
from cpflare.scaling.study import Point, Study, missing
from cpflare.scaling.table import to_csv, to_markdown
from cpflare.train.step import Learner
from support.harness import run_ranks
from support.paths import ROOT

MODEL = ("model.channels=16", "model.heads=2", "model.blocks=1", "model.latents=4")
STUDIES = ROOT / "studies"
SHIPPED = sorted(path.parent for path in STUDIES.glob("*/study.json"))
MIB = 2**20


# ---- measuring ------------------------------------------------------------------------------


def _measure(rank, world_size, slow_rank_s=0.0, extra_mib=0, delay_s=0.0):
    """Three steps of a tiny model; the last rank is slowed, or holds more than the others."""
    point = Point("flare", 40, "fp32", "in_memory", MODEL, world_size)
    config = point.config()
    topology = record(build_topology(config.parallel, torch.device("cpu")), delay_s)
    learner = Learner(config, topology, cases_per_step=1, total_steps=10)
    meter = MemoryMeter(topology.device)

    def step(sample):
        facts = learner.step(sample)
        if rank == world_size - 1:
            time.sleep(slow_rank_s)
            torch.ones(extra_mib * MIB // 4).sum()
        return facts

    bench = StepMeter(topology, step, synthetic_steps(config, topology))
    samples = [bench.step() for _ in range(3)]
    peaks = bench.gather([float(meter.idle), float(meter.peak()[0])])
    return samples, [(peak - idle) / MIB for idle, peak in peaks]


@pytest.mark.slow
@pytest.mark.alone
def test_a_slowed_rank_shows_in_the_step():
    plain, _ = run_ranks(2, _measure)[0]
    slowed, _ = run_ranks(2, _measure, 0.2)[0]
    for before, after in zip(plain[1:], slowed[1:], strict=True):
        assert after["step_s"][1] >= 0.2
        assert max(after["step_s"]) > max(before["step_s"])
        assert after["step_s"][0] < after["step_s"][1]  # each rank's own time


@pytest.mark.slow
def test_a_large_allocation_on_one_rank_shows_in_its_peak():
    _, plain = run_ranks(2, _measure)[0]
    _, larger = run_ranks(2, _measure, 0.0, 300)[0]
    assert larger[1] > 290
    assert larger[1] - plain[1] > 200
    assert abs(larger[0] - plain[0]) < 100


def test_the_peak_starts_from_the_idle_process():
    # Mapped, since an allocator that keeps its heap would give the second what the first had.
    with mmap.mmap(-1, 200 * MIB) as spent:
        spent.write(b"\1" * (200 * MIB))
    meter = MemoryMeter(torch.device("cpu"))
    content = b"\1" * MIB
    with mmap.mmap(-1, 50 * MIB) as held:
        for _ in range(50):
            held.write(content)
        above = (meter.peak()[0] - meter.idle) / MIB
    assert 45 < above < 120


def test_all_ranks_report_alike_and_a_delay_is_communication():
    results = run_ranks(2, _measure, 0.0, 0, 0.02)
    samples = results[0][0]
    assert results[0] == results[1]
    calls = sum(samples[-1]["calls"].values())
    assert calls == 3
    # A process that the machine holds up between sending and waiting waits the less.
    assert any(min(sample["comm_s"]) >= calls * 0.02 for sample in samples)
    assert all(max(sample["step_s"]) >= max(sample["comm_s"]) for sample in samples)


# ---- figures --------------------------------------------------------------------------------


def _record(point, steps, *, comm=0.0, idle=100, peak=1100, session="s", loading=None):
    """A made-up record whose last rank is the slowest by a tenth."""
    slower = [1.0] * (point.ranks - 1) + [1.1]
    return {
        "point": point.to_dict(),
        "config": {"model": vars(point.config().model)},
        "parameters": 1000,
        "device": "cpu",
        "threads": 1,
        "idle_bytes": [idle] * point.ranks,
        "peak_bytes": [peak * MIB] * (point.ranks - 1) + [(peak + 8) * MIB],
        "reserved_bytes": [peak * MIB] * point.ranks,
        "warmup": [],
        "samples": [
            {
                "step_s": [seconds * slow for slow in slower],
                "data_s": [0.1 * seconds] * point.ranks,
                "comm_s": [comm] * point.ranks,
                "cpu_s": [seconds] * point.ranks,
                "calls": {"all_gather": 1} if point.ranks > 1 else {},
                "bytes": [77] * point.ranks,
            }
            for seconds in steps
        ],
        "loading": loading,
        "session": session,
        "load_before": 0.1,
    }


def _study(*records):
    protocol = {**Protocol(5, 1, 1, 1).to_dict(), "data": "random numbers"}
    named = {Point.from_dict(record["point"]).name: record for record in records}
    return Study(protocol, describe_machine(), named, "A study", "2026-01-01", "cpflare scaling")


ONE = Point("flare", 1000, overrides=MODEL)
TWO = dataclasses.replace(ONE, ranks=2)


def test_figures_follow_from_the_samples():
    steps_one, steps_two = [1.0, 1.2, 1.1, 5.0, 1.3], [0.6, 0.7, 0.55, 0.65, 3.0]
    one, two = summarise(
        _study(_record(ONE, steps_one), _record(TWO, steps_two, comm=0.05, peak=560))
    )
    assert one.step_s == pytest.approx(1.1 * 1.2)
    assert two.step_s == pytest.approx(1.1 * 0.65)
    assert two.step_q1_s == pytest.approx(1.1 * 0.6)
    assert two.step_q3_s == pytest.approx(1.1 * 0.7)
    assert two.time_efficiency == pytest.approx(1.2 / (2 * 0.65))
    pairs = np.array(steps_one) / (2 * np.array(steps_two))
    assert two.paired_time_efficiency == pytest.approx(np.median(pairs))
    assert two.memory_efficiency == pytest.approx((1108 * MIB - 100) / (2 * (568 * MIB - 100)))
    assert two.peak_bytes == 568 * MIB - 100
    assert two.comm_s == 0.05
    assert two.work_efficiency == pytest.approx(1.2 / (2 * 0.65))
    assert two.data_s == pytest.approx(0.065)
    assert two.compute_s == pytest.approx(1.1 * 0.65 - 0.05 - 0.065)
    assert two.data_free_s == pytest.approx(two.step_s - two.data_s)
    assert (two.messages, two.sent_bytes) == (1, 77)
    assert two.theory_bytes == 4 * (4 * (16 + 2 + 16 + 2) + 1000)


def test_pairs_are_only_of_points_that_took_turns():
    rows = summarise(_study(_record(ONE, [1.0] * 3), _record(TWO, [0.5] * 3, session="later")))
    assert rows[1].paired_time_efficiency is None
    assert rows[1].time_efficiency == pytest.approx(1.0)


def test_without_a_single_rank_there_is_no_efficiency():
    other = dataclasses.replace(ONE, tokens=999)
    study = _study(_record(TWO, [0.5]), _record(other, [1.0]))
    two = next(row for row in summarise(study) if row.point.ranks == 2)
    assert two.time_efficiency is None
    assert two.memory_efficiency is None
    assert "no single rank" in to_markdown(study)
    assert "no efficiency is given" in to_html(study, summarise(study), b"")


def test_ddp_counts_a_case_a_rank():
    ddp = dataclasses.replace(TWO, method="ddp")
    row = summarise(_study(_record(ONE, [1.0]), _record(ddp, [1.1], peak=1100)))[1]
    assert row.step_s == pytest.approx(1.1 * 1.1 / 2)
    assert row.time_efficiency == pytest.approx(1 / 1.1)
    assert row.memory_efficiency == pytest.approx(0.5, rel=1e-4)
    assert row.theory_bytes is None


def test_ranks_that_exchange_nothing_are_the_bound():
    bound = dataclasses.replace(TWO, method="separate")
    rows = summarise(_study(*(_record(p, [s]) for p, s in ((ONE, 1.0), (TWO, 0.6), (bound, 0.54)))))
    assert [row.of_separate for row in rows] == [None, pytest.approx(0.9), pytest.approx(1.0)]
    assert rows[2].theory_bytes is None


def test_what_the_loader_reads_is_reported():
    loading = {"windows": 4, "read_s": [0.5, 0.4], "tokens": [2000, 2000]}
    study = _study(_record(ONE, [1.0]), _record(TWO, [0.5], loading=loading))
    assert summarise(study)[1].read_cells_per_s == 4000
    assert "| 4,000 | 0.5500 | 0.0500 | 0.5000 |" in to_markdown(study)


@pytest.mark.slow
def test_all_files_of_a_study(tmp_path):
    study = _study(_record(ONE, [1.0, 1.1]), _record(TWO, [0.5, 0.6]))
    study.save(tmp_path / "study.json")
    again = Study.load(tmp_path / "study.json")
    assert again.points == [ONE, TWO]
    paths = write_study(again, tmp_path)
    assert [path.name for path in paths] == ["study.csv", "study.md", "study.png", "study.html"]
    assert paths[2].read_bytes().startswith(b"\x89PNG")
    page = paths[3].read_text()
    assert "data:image/png;base64," in page
    assert 'src="http' not in page
    assert "1 thread(s) a rank" in page
    lines = list(csv.DictReader(io.StringIO(paths[0].read_text())))
    assert [line["ranks"] for line in lines] == ["1", "2"]


# ---- shipped studies ------------------------------------------------------------------------


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.name)
def test_shipped_figures_follow_from_the_shipped_samples(folder):
    study = Study.load(folder / "study.json")
    assert (folder / "study.csv").read_text() == to_csv(summarise(study))
    assert (folder / "study.md").read_text() == to_markdown(study)
    for key in ("cpu", "cores", "torch", "python"):
        assert study.machine[key]
    assert study.protocol["threads"] == 1
    assert study.date
    for row, found in zip(
        summarise(study), csv.DictReader((folder / "study.csv").open()), strict=True
    ):
        samples = study.records[row.point.name]["samples"]
        seconds = [max(sample["step_s"]) / row.point.num_cases for sample in samples]
        assert float(found["step_s"]) == pytest.approx(np.median(seconds))
        assert len(samples) == study.protocol["rounds"] * study.protocol["steps"]


# ---- studies --------------------------------------------------------------------------------


def test_a_grid_measures_a_single_rank_once():
    points = list(
        grid(
            models=["flare"],
            tokens=[100],
            ranks=[1, 2],
            methods=["ours", "textbook"],
            networks=[("local", 0.0, 0.0), ("hosts", 1.0, 0.0)],
        )
    )
    assert [point.ranks for point in points] == [1, 2, 2, 2, 2]
    assert len({point.name for point in points}) == 5


def test_a_family_that_lacks_a_point_is_measured_whole():
    other = dataclasses.replace(ONE, model="flarepp")
    study = _study(_record(ONE, [1.0]), _record(other, [1.0]))
    assert missing(study, [ONE, TWO, other]) == [[ONE, TWO]]
    assert missing(study, [ONE, other]) == []


def test_processors_of_one_name_are_told_apart(tmp_path):
    """A study is not gone on with on another generation, and virtual machines name them alike."""
    path = tmp_path / "cpuinfo"
    unnamed = platform.processor() or platform.machine()
    assert cpu_name(path) == unnamed
    zen5 = "processor : 0\ncpu family\t: 26\nmodel\t\t: 2\nmodel name : AMD EPYC\nstepping : 1\n"
    other = zen5.replace("26", "25")
    path.write_text(f"{zen5}\n{other}")
    assert cpu_name(path) == "AMD EPYC (family 26, model 2, stepping 1)"
    path.write_text(other)
    assert cpu_name(path) == "AMD EPYC (family 25, model 2, stepping 1)"
    path.write_text("processor : 0\nCPU part\t: 0xd4f\n")
    assert cpu_name(path) == f"{unnamed} (CPU part 0xd4f)"


def test_a_study_goes_on_only_with_its_own_protocol(tmp_path):
    path = tmp_path / "study.json"
    study = _study(_record(ONE, [1.0]))
    study.save(path)
    assert Study.resume(path, study.protocol, "t", "c").points == [ONE]
    with pytest.raises(ConfigError, match=r"has protocol threads=1, this one 2; give another"):
        Study.resume(path, {**study.protocol, "threads": 2}, "t", "c")
    values = json.loads(path.read_text())
    values["machine"]["cpu"] = "an abacus"
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="has machine cpu=an abacus"):
        Study.resume(path, study.protocol, "t", "c")
    path.write_text(path.read_text()[:100])
    with pytest.raises(DataError, match="is damaged"):
        Study.load(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "1.5"], "--tokens 1.5 must be whole numbers"),
        (["--ranks", "0"], "--ranks 0 must be whole numbers"),
        (["--network", "pigeons"], "--network pigeons must be one of local, hosts, emulated"),
        (["--methods", "magic"], "method magic must be one of ours"),
        (["--models", "nope"], "model.mixer='nope'"),
        (["--rounds", "0"], "--rounds 0 must be at least 1"),
        (["model.channels=17"], "model.channels=17 is not divisible"),
    ],
)
def test_errors_are_one_line(tmp_path, arguments, message):
    with pytest.raises(ConfigError, match=message) as caught:
        scaling.main(["--out", str(tmp_path), *arguments])
    assert "\n" not in str(caught.value)


def test_a_study_file_is_read_strictly(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text("grids:\n  - {models: [flare], tokens: [10], ranks: [1], speed: 3}\n")
    with pytest.raises(ConfigError, match="unknown key 'speed'"):
        read_study_file(path)
    path.write_text("title: nothing\n")
    with pytest.raises(ConfigError, match="needs a list 'grids:'"):
        read_study_file(path)


def test_the_shipped_study_files_are_grids():
    for path in (ROOT / "configs/studies").glob("*.yaml"):
        plan = read_study_file(path)
        Protocol(**plan["protocol"])
        points = points_of(plan["grids"])
        families = {point.family for point in points}
        assert families == {point.family for point in points if point.ranks == 1}


@pytest.mark.slow
def test_a_whole_study_is_measured_and_gone_on_with(tmp_path, capsys):
    arguments = ["--out", str(tmp_path), "--models", "flare", "--tokens", "50", "--ranks", "1,2"]
    arguments += ["--rounds", "2", "--network", "emulated", "--latency-ms", "5", *MODEL]
    scaling.main(arguments)
    study = Study.load(tmp_path / "study.json")
    assert [len(r["samples"]) for r in study.records.values()] == [2, 2]
    assert [len(r["warmup"]) for r in study.records.values()] == [1, 1]
    one, two = summarise(study)
    assert two.messages == 3
    assert two.comm_s >= 3 * 0.005
    assert two.paired_time_efficiency is not None
    assert "emulated, 5 ms a collective" in capsys.readouterr().out
    before = (tmp_path / "study.json").stat().st_mtime_ns
    scaling.main(arguments)
    assert "0 points to measure, 2 are in" in capsys.readouterr().err
    assert (tmp_path / "study.json").stat().st_mtime_ns == before
    assert one.time_efficiency == 1.0


def test_help_of_the_comparison(capsys):
    compare_peers.main(["--help"])
    assert "per_parameter" in capsys.readouterr().out
