"""How many devices share a case, and how many cases a step has: dp × cp for a number of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cpflare.plan.planner import Planner, Prediction, largest_loss


@dataclass(frozen=True)
class Split:
    """One way to split devices: `dp` replicas of `cp` ranks that share a case each."""

    dp: int
    cp: int
    cases: int  # of a step
    prediction: Prediction  # of one rank with one case
    fits: bool

    @property
    def case_s(self) -> float:
        """Seconds of training a case. A replica takes its cases one after another and updates
        once."""
        one = self.prediction
        rounds = self.cases // self.dp
        return (rounds * (one.step_s - one.fixed_s) + one.fixed_s) / self.cases

    def to_dict(self) -> dict[str, Any]:
        return {
            "dp": self.dp,
            "cp": self.cp,
            "cases_per_step": self.cases,
            "case_s": self.case_s,
            "memory_bytes": self.prediction.memory_bytes,
            "fits": self.fits,
        }


def splits(planner: Planner, cells: int, devices: int) -> list[Split]:
    """Every split that the configuration's `train.cases_per_step` allows, few ranks a case first.

    At least one, since a single replica is always allowed.
    """
    wanted = planner.config.train.cases_per_step
    found = []
    for cp in (n for n in range(1, devices + 1) if devices % n == 0):
        dp = devices // cp
        if (wanted is None or wanted % dp == 0) and (cp <= cells or cp == devices):
            prediction = planner.predict(cells, cp, replicas=dp)
            found.append(Split(dp, cp, wanted or dp, prediction, planner.fits(prediction)))
    return found


def best_split(found: Sequence[Split]) -> Split | None:
    """The split that trains the most cases a second, of those whose memory suffices."""
    return min((s for s in found if s.fits), key=lambda s: s.case_s, default=None)


def split_text(found: Sequence[Split], devices: int, name: str) -> str:
    """The split that is recommended, and why no other."""
    best = best_split(found)
    if best is None:
        return f"split   of {devices} × {name}: none fits; use more devices, or stream"
    text = (
        f"split   {devices} × {name} as parallel.dp={best.dp} parallel.cp={best.cp}: "
        f"{best.case_s * 1e3:.3g} ms a case, {best.cases} case(s) a step"
    )
    reasons = []
    fewer = [s for s in found if s.cp < best.cp]
    if fewer and not fewer[-1].fits:
        reasons.append(f"a case does not fit on {fewer[-1].cp}")
    elif fewer:
        reasons.append(f"{_slower(fewer[-1], best)} with cp={fewer[-1].cp}")
    elif best.dp < devices:
        reasons.append("train.cases_per_step allows no more replicas")
    more = [s for s in found if s.cp > best.cp]
    if more:
        lost = largest_loss(more[0].prediction)
        reasons.append(f"{_slower(more[0], best)} with cp={more[0].cp}: {lost}")
    return f"{text}; {'; '.join(reasons)}" if reasons else text


def _slower(other: Split, best: Split) -> str:
    return f"{other.case_s / best.case_s - 1:.0%} more time a case"
