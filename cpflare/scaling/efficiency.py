"""What follows from a study's raw samples: medians, efficiencies, traffic beside theory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cpflare.config import config_from_dict
from cpflare.ops.merge import GATHER_UP_TO
from cpflare.scaling.messages import Message, messages_of
from cpflare.scaling.study import METHODS, Point, Study

_OTHER_MESSAGES = ("gather", "ddp", "separate")
"""Methods that the theory of the merge is not of."""


@dataclass(frozen=True)
class Row:
    """One point's figures. Seconds are medians over the timed steps; a step takes as long as its
    slowest rank, whose time is what is split into data, compute and communication.

    `step_s` to `comm_s` count one case: DDP's step, which trains a case a rank, is divided by the
    ranks. `read_cells_per_s` is what the slowest rank reads with no training beside it, of a study
    on a store. `peak_bytes` is the largest over ranks, above the idle process. Efficiencies are
    None where the study has no single rank of the same model and size. `work_efficiency` compares
    the processor time of all ranks with the single one's: what splitting adds to the work, without
    waiting and without what else the machine does. `of_separate` compares the step with that of as
    many ranks which do the same work and exchange nothing: what messages and waiting cost, and not
    what the ranks' processors take from one another.
    """

    point: Point
    threads: int
    num_samples: int
    step_s: float
    step_q1_s: float
    step_q3_s: float
    data_s: float
    compute_s: float
    comm_s: float
    peak_bytes: int
    reserved_bytes: int
    messages: int
    sent_bytes: int
    theory_messages: int | None
    theory_bytes: int | None
    time_efficiency: float | None
    paired_time_efficiency: float | None
    work_efficiency: float | None
    memory_efficiency: float | None
    of_separate: float | None
    round_trip_ms: float | None
    read_cells_per_s: float | None

    @property
    def data_free_s(self) -> float:
        """What a step would take if its data were there at once."""
        return self.step_s - self.data_s


def summarise(study: Study) -> list[Row]:
    """All points' figures, from the raw samples alone, in the order of family and ranks."""
    measured = [(Point.from_dict(record["point"]), record) for record in study.records.values()]
    measured.sort(key=lambda pair: _order(pair[0]))
    singles = {p.family: record for p, record in measured if (p.ranks, p.method) == (1, "ours")}
    bounds = {(p.family, p.ranks): record for p, record in measured if p.method == "separate"}
    return [
        _row(point, record, singles.get(point.family), bounds.get((point.family, point.ranks)))
        for point, record in measured
    ]


def _order(point: Point) -> tuple[Any, ...]:
    network = ("local", "hosts", "emulated").index(point.network)
    method = METHODS.index(point.method)
    return (*point.family, point.ranks, network, point.latency_ms, method)


def step_seconds(record: Mapping[str, Any]) -> np.ndarray:
    """Seconds of each timed step, to its slowest rank.  [steps]"""
    return np.array([max(sample["step_s"]) for sample in record["samples"]])


def cpu_seconds(record: Mapping[str, Any]) -> np.ndarray:
    """Processor time of each timed step, of all ranks together.  [steps]"""
    return np.array([sum(sample["cpu_s"]) for sample in record["samples"]])


def peak_bytes(record: Mapping[str, Any]) -> int:
    """The most memory of any rank above its idle process."""
    most: int = max(
        peak - idle for peak, idle in zip(record["peak_bytes"], record["idle_bytes"], strict=True)
    )
    return most


def _row(
    point: Point,
    record: Mapping[str, Any],
    single: Mapping[str, Any] | None,
    bound: Mapping[str, Any] | None,
) -> Row:
    """A point's figures: against its family's single rank, and against ranks that are separate."""
    samples, cases = record["samples"], point.num_cases
    seconds = step_seconds(record) / cases
    q1, median, q3 = np.percentile(seconds, [25, 50, 75])
    slowest = [int(np.argmax(sample["step_s"])) for sample in samples]
    data = [sample["data_s"][rank] / cases for sample, rank in zip(samples, slowest, strict=True)]
    comm = [sample["comm_s"][rank] / cases for sample, rank in zip(samples, slowest, strict=True)]
    compute = seconds - np.array(data) - np.array(comm)
    last = samples[-1]
    trips = record.get("round_trips_ms")
    peak = peak_bytes(record)
    time_efficiency = paired = work = memory_efficiency = None
    if single is not None:
        base = step_seconds(single)
        time_efficiency = float(np.median(base) / (point.ranks * median))
        memory_efficiency = peak_bytes(single) / (point.ranks * peak)
        work = float(np.median(cpu_seconds(single)) * cases / np.median(cpu_seconds(record)))
        if len(base) == len(seconds) and single["session"] == record["session"]:
            paired = float(np.median(base / (point.ranks * seconds)))
    return Row(
        point=point,
        threads=record["threads"],
        num_samples=len(samples),
        step_s=float(median),
        step_q1_s=float(q1),
        step_q3_s=float(q3),
        data_s=float(np.median(data)),
        compute_s=float(np.median(compute)),
        comm_s=float(np.median(comm)),
        peak_bytes=peak,
        reserved_bytes=max(record["reserved_bytes"]),
        messages=sum(last["calls"].values()),
        sent_bytes=max(last["bytes"]),
        theory_messages=theory_messages(point, record),
        theory_bytes=theory_bytes(point, record),
        time_efficiency=time_efficiency,
        paired_time_efficiency=paired,
        work_efficiency=work,
        memory_efficiency=memory_efficiency,
        of_separate=None if bound is None else float(np.median(step_seconds(bound)) / median),
        round_trip_ms=None if not trips else float(np.median(trips)),
        read_cells_per_s=_reading(record["loading"]),
    )


def _reading(loading: Mapping[str, Any] | None) -> float | None:
    if loading is None:
        return None
    speeds = zip(loading["tokens"], loading["read_s"], strict=True)
    return float(min(tokens / seconds for tokens, seconds in speeds))


def theory_bytes(point: Point, record: Mapping[str, Any]) -> int | None:
    """Bytes that a rank must send in a step: what the stages send among many ranks, and each
    parameter's gradient once. None for methods that the theory is not of."""
    if (sent := _theory(point, record)) is None:
        return None
    size = 8 if point.precision == "fp64" else 4
    return sum(message.num_bytes for message in sent) + size * int(record["parameters"])


def theory_messages(point: Point, record: Mapping[str, Any]) -> int | None:
    """Messages of a step: those of the stages among many ranks, and one for gradients."""
    sent = _theory(point, record)
    return None if sent is None else len(sent) + 1


def _theory(point: Point, record: Mapping[str, Any]) -> tuple[Message, ...] | None:
    if point.method in _OTHER_MESSAGES or point.ranks == 1:
        return None
    train = {"precision": point.precision}
    config = config_from_dict({"model": record["config"]["model"], "train": train})
    return messages_of(config, GATHER_UP_TO + 1).stages
