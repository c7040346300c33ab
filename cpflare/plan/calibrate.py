"""Fits a plan's rates to a measured study, so that it predicts points which were not measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cpflare.errors import DataError
from cpflare.plan.counting import count_costs
from cpflare.plan.devices import LINKS, Device, Link
from cpflare.plan.planner import Planner, Rates, default_chunk, table_rates
from cpflare.scaling.efficiency import peak_bytes, step_seconds
from cpflare.scaling.messages import messages_of
from cpflare.scaling.study import Point, Study

_FEWEST_POINTS = 3


@dataclass(frozen=True)
class Calibration:
    """Rates and a link that follow from measured points of one precision."""

    rates: Rates
    link: Link
    device: str
    threads: int
    precision: str
    points: tuple[Point, ...]

    def planner(self, point: Point, device: Device) -> Planner:
        """A planner of a point's configuration with these rates."""
        config = point.config()
        return Planner(config, self.on(device), self.link, self.rates, count_costs(config))

    def on(self, device: Device) -> Device:
        """The device with the measured link between its ranks."""
        return replace(device, link=self.link)


def calibrate(
    study: Study,
    device: Device,
    *,
    precision: str = "fp32",
    keep: Callable[[Point], bool] = lambda point: True,
) -> Calibration:
    """Fit rates to the study's own points of `precision` on one host for which `keep` holds.

    Time is a sum of what is counted, each at a rate that is not negative (non-negative least
    squares of the relative error); memory is a base and a multiple of the counted bytes.

    Raises:
        DataError: too few such points, or they were measured on another kind of device.
    """
    records = [
        record
        for record in study.records.values()
        if _usable(point := Point.from_dict(record["point"]), precision) and keep(point)
    ]
    if len(records) < _FEWEST_POINTS:
        raise DataError(
            f"the study has {len(records)} points of {precision} on one host to calibrate with; "
            f"measure at least {_FEWEST_POINTS}, of several sizes and ranks"
        )
    _require_device(records, device)
    rows = [_features(record, device) for record in records]
    names = sorted({name for row in rows for name in row})
    matrix = np.array([[row.get(name, 0.0) for name in names] for row in rows])
    times = np.array([float(np.median(step_seconds(record))) for record in records])
    found = _non_negative(matrix / times[:, None])
    fitted = {name: float(rate) for name, rate in zip(names, found, strict=True)}
    counted = np.array([_counted_bytes(record, device) for record in records])
    held = np.array([float(peak_bytes(record)) for record in records])
    base, scale, chunk_scale = _non_negative(counted / held[:, None])
    table = table_rates(device, precision)
    rates = Rates(
        matmul_s=fitted["matmul"],
        attention_s=fitted["attention"],
        moved_s=fitted["moved"],
        kernel_s=fitted.get("kernels", table.kernel_s),
        step_s=fitted["steps"],
        contention_s=fitted.get("contention", table.contention_s),
        memory_scale=float(scale),
        chunk_scale=float(chunk_scale),
        memory_base=float(base),
    )
    default = LINKS["loopback"] if device.shared_memory else device.link
    link = default
    if "messages" in fitted:
        # What a message costs on these few ranks is the call's; steps of a tree keep the table's.
        speed = 1 / fitted["sent"] if fitted["sent"] else default.bytes_per_s
        link = replace(default, base_s=fitted["messages"], hop_s=0.0, bytes_per_s=speed)
    points = tuple(Point.from_dict(record["point"]) for record in records)
    return Calibration(rates, link, device.name, records[0]["threads"], precision, points)


def _require_device(records: Sequence[Mapping[str, Any]], device: Device) -> None:
    for kind in {record["device"] for record in records}:
        if device.name not in kind.lower():
            raise DataError(
                f"the study was measured on {kind}, and the plan is for {device.name}; calibrate "
                "with a study of that device"
            )


def _usable(point: Point, precision: str) -> bool:
    return point.method == "ours" and point.network == "local" and point.precision == precision


def _features(record: Mapping[str, Any], device: Device) -> dict[str, float]:
    """What is counted in a point's step, by the rate that it is multiplied with."""
    point = Point.from_dict(record["point"])
    config = point.config()
    costs = count_costs(config)
    tokens = -(-point.tokens // point.ranks)
    counts = costs.at(tokens, default_chunk(config, tokens, on_cpu=device.shared_memory))
    features = {
        "matmul": counts.matmul_flops,
        "attention": counts.attention_flops,
        "moved": counts.moved_bytes + 8 * costs.parameter_bytes,
        "steps": 1.0,
    }
    if device.shared_memory:
        # A GPU hides launches behind the work: no part of the sum, so that the table's rate stays.
        features["kernels"] = counts.kernels
    if point.ranks > 1:
        messages = messages_of(config, point.ranks)
        sent = (*messages.stages, *messages.gradients)
        share = (point.ranks - 1) / point.ranks
        ways = {"all_gather": point.ranks - 1, "all_reduce": 2 * share}
        features["messages"] = float(len(sent))
        features["sent"] = sum(ways[m.kind] * m.num_bytes for m in sent)
        if device.shared_memory:
            neighbours = min(point.ranks, device.per_node) - 1
            features["contention"] = counts.moved_bytes * neighbours
    return features


def _counted_bytes(record: Mapping[str, Any], device: Device) -> list[float]:
    """What memory is a multiple of: 1, the bytes of all tokens and weights, those of a chunk."""
    point = Point.from_dict(record["point"])
    config = point.config()
    costs = count_costs(config)
    tokens = -(-point.tokens // point.ranks)
    chunk = default_chunk(config, tokens, on_cpu=device.shared_memory)
    working = costs.working_bytes(tokens, chunk)
    kept = costs.at(tokens, chunk).live_bytes - working + 4 * costs.parameter_bytes
    return [1.0, kept, working]


def _non_negative(scaled: np.ndarray) -> np.ndarray:
    """Rates w >= 0 with scaled @ w near 1, whatever the columns' units."""
    from scipy.optimize import nnls

    units = np.abs(scaled).max(axis=0)
    units[units == 0] = 1.0
    found, _ = nnls(scaled / units, np.ones(len(scaled)))
    rates: np.ndarray = found / units
    return rates


@dataclass(frozen=True)
class Check:
    """A measured point beside its prediction."""

    point: Point
    seen: bool
    step_s: float
    predicted_step_s: float
    memory_bytes: float
    predicted_memory_bytes: float

    @property
    def time_error(self) -> float:
        return self.predicted_step_s / self.step_s - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_memory_bytes / self.memory_bytes - 1


def check(study: Study, calibration: Calibration, device: Device) -> list[Check]:
    """Every comparable point of a study beside its prediction; `seen` if it was fitted to."""
    checks = []
    for record in study.records.values():
        point = Point.from_dict(record["point"])
        if not _usable(point, calibration.precision):
            continue
        prediction = calibration.planner(point, device).predict(point.tokens, point.ranks)
        checks.append(
            Check(
                point,
                point in calibration.points,
                float(np.median(step_seconds(record))),
                prediction.step_s,
                float(peak_bytes(record)),
                prediction.memory_bytes,
            )
        )
    return checks
