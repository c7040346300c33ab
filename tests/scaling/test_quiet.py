"""A study waits for a quiet machine, and says so where there was none."""

import dataclasses
import itertools
import math
import time

import pytest
import torch

from cpflare.errors import ConfigError
from cpflare.scaling.efficiency import summarise
from cpflare.scaling.machine import describe_machine
from cpflare.scaling.protocol import Protocol
from cpflare.scaling.quiet import Probe, Quiet
from cpflare.scaling.run import measure_in_turns
from cpflare.scaling.study import Point, Study
from cpflare.scaling.table import describe

MODEL = ("model.channels=16", "model.heads=2", "model.blocks=1", "model.latents=4")
ONE = Point("flare", 40, overrides=MODEL)
TWO = dataclasses.replace(ONE, ranks=2)


def _quiet(*seconds, limit=0.1, patience_s=100.0):
    """A machine whose probe first takes 1 s, then `seconds`, the last of them for ever."""
    first = itertools.repeat(1.0, 30)
    probes = itertools.chain(first, seconds, itertools.repeat(seconds[-1]))
    return Quiet(1, limit, patience_s, probe=lambda: next(probes), first_pause_s=0.0)


def test_noise_is_over_the_fastest_probe_so_far():
    quiet = _quiet(1.3, 0.5, 1.0)
    assert quiet.noise() == pytest.approx(0.3)
    assert quiet.noise() == 0.0
    assert quiet.noise() == pytest.approx(1.0)


@pytest.mark.alone
def test_it_waits_until_the_noise_is_over():
    quiet = _quiet(1.5, 1.05, patience_s=0.2)
    start = time.monotonic()
    said = []
    assert quiet.wait(said.append) == pytest.approx(0.05)
    assert said == ["    waiting: noise 50%; patience for 0 s"]
    assert 0.2 <= time.monotonic() - start < 1.0


@pytest.mark.alone
def test_its_patience_ends_and_is_renewed():
    quiet = _quiet(1.5, patience_s=0.1)
    assert quiet.wait() == pytest.approx(0.5)
    assert quiet.left_s == 0.0
    start = time.monotonic()
    assert quiet.wait() == pytest.approx(0.5)
    assert time.monotonic() - start < 0.1
    quiet.begin()
    assert quiet.left_s == 0.1


def test_the_probe_works_on_every_processor():
    probe = Probe(2)
    threads = torch.get_num_threads()
    assert 0 < probe() < 60
    assert all(bool((output == 1).all()) for output in probe.outputs)  # exp(0 W) + 0
    assert torch.get_num_threads() == threads


@pytest.mark.slow
def test_turns_on_a_loud_machine_are_set_aside_and_taken_again():
    """Before and after each turn: the second point's first turn ends loud, all else is quiet."""
    said = []
    quiet = _quiet(1.0, 1.0, 1.0, 1.2, 1.0)
    points, protocol = [ONE, TWO], Protocol(2, 1, 1, 1, noise_limit=0.1, patience_s=100.0)
    records = measure_in_turns(points, protocol, quiet=quiet, say=said.append)
    assert [len(record["samples"]) for record in records] == [2, 2]
    assert [len(record["set_aside"]) for record in records] == [0, 1]
    assert records[1]["set_aside"][0]["noise"] == pytest.approx([0.0, 0.2])
    assert [sample["noise"] for sample in records[1]["samples"]] == [[0.0, 0.0]] * 2
    assert [sample["turn"] for sample in records[1]["samples"]] == [1, 2]
    assert sum("set aside" in text for text in said) == 1
    assert quiet.left_s < 100.0
    study = _study(protocol, records)
    assert [row.num_samples for row in summarise(study)] == [2, 2]
    noise = next(line for line in describe(study) if line.startswith("noise"))
    assert "(1 step(s)) and taken again; 0 of 4 steps count with more" in noise


@pytest.mark.slow
def test_turns_count_when_patience_has_run_out():
    protocol = Protocol(2, 1, 0, 1, noise_limit=0.1, patience_s=0.2)
    (record,) = records = measure_in_turns(
        [ONE], protocol, quiet=_quiet(2.0, patience_s=0.2), say=lambda text: None
    )
    assert [sample["noise"] for sample in record["samples"]] == [[1.0, 1.0]] * 2
    assert record["set_aside"] == []
    assert "2 of 2 steps count with more" in "".join(describe(_study(protocol, records)))


def test_values_that_cannot_be_are_named():
    with pytest.raises(ConfigError, match="--noise-limit 0 must be above 0"):
        Protocol(1, 1, 1, 1, noise_limit=0)
    with pytest.raises(ConfigError, match="--patience-s -1 must be at least 0"):
        Protocol(1, 1, 1, 1, patience_s=-1)
    with pytest.raises(ConfigError, match="--patience-s inf must be at least 0, and finite"):
        Protocol(1, 1, 1, 1, patience_s=math.inf)


def _study(protocol, records):
    named = {Point.from_dict(record["point"]).name: record for record in records}
    values = {**protocol.to_dict(), "data": "random numbers"}
    return Study(values, describe_machine(), named, "A study", "2026-01-01", "cpflare scaling")
