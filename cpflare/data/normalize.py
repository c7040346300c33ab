"""Fields to network inputs and back: min-max scaled position, unit normal, standardised targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cpflare.config import Config
from cpflare.data.statistics import CONSTANT, Statistics
from cpflare.errors import DataError
from cpflare.fields import FIELDS

_FLOOR = 1e-8
"""Smallest range or standard deviation to divide by, relative to 1: a constant channel gives 0."""


@dataclass(frozen=True)
class Normalizer:
    """The affine maps of a run, from its training split's statistics.

    Position is scaled to [0, 1] over the training split's bounds, axis by axis (the published
    setting); the normal is left as it is; each target channel gets mean 0 and standard deviation 1.
    """

    inputs: Sequence[str]
    targets: Sequence[str]
    relative_position: bool
    position_low: np.ndarray  # [3], absolute, or relative to the bounding box's centre
    position_range: np.ndarray  # [3]
    target_mean: np.ndarray  # [O]
    target_std: np.ndarray  # [O]
    condition: Sequence[str] = ()  # further fields, which come after the inputs, and as they do
    parameters: Sequence[str] = ()  # of the case, the same for each of its tokens; these come last
    parameter_mean: np.ndarray = field(default_factory=lambda: np.zeros(0))  # [P]
    parameter_std: np.ndarray = field(default_factory=lambda: np.ones(0))  # [P]

    @staticmethod
    def from_statistics(
        config: Config, statistics: Statistics, cases: Sequence[Mapping[str, float]] = ()
    ) -> Normalizer:
        """The maps for a configuration's inputs, targets and kind of position.

        `cases` are the parameters of each training case, for `data.parameters`.
        """
        relative = config.data.position == "relative"
        position = statistics.fields["position_relative" if relative else "position"]
        extent = position.max - position.min
        targets = [statistics.fields[name] for name in config.data.targets]
        return Normalizer(
            inputs=tuple(config.data.inputs),
            targets=tuple(config.data.targets),
            relative_position=relative,
            position_low=position.min,
            position_range=np.where(extent > _FLOOR, extent, 1.0),
            target_mean=np.concatenate([each.mean for each in targets]),
            target_std=np.concatenate([np.maximum(each.std, _FLOOR) for each in targets]),
            condition=tuple(config.data.condition),
            parameters=tuple(names := config.data.parameters),
            parameter_mean=np.array([np.mean([c[name] for c in cases]) for name in names]),
            parameter_std=np.array([_deviation([c[name] for c in cases]) for name in names]),
        )

    @property
    def read(self) -> tuple[str, ...]:
        """The fields that `encode_inputs` reads."""
        return tuple(dict.fromkeys((*self.inputs, *self.condition)))

    def encode_inputs(
        self,
        fields: Mapping[str, np.ndarray],
        offset: np.ndarray,
        dtype: torch.dtype,
        parameters: Mapping[str, float] = MappingProxyType({}),
    ) -> Tensor:
        """Network inputs of n tokens.  `position` is centred: without the case's `offset` [3]. ->
        [n, F]

        `parameters` are the case's, by name. Raises DataError where one of them is missing.

        The offset is folded into the bounds in float64, so that a mesh far from the origin loses no
        digits: what is scaled in the run's dtype is the small centred position.
        """
        parts = []
        for name in (*self.inputs, *self.condition):
            part = torch.from_numpy(np.ascontiguousarray(fields[name])).to(dtype)
            if name == "position":
                low = self.position_low - (0.0 if self.relative_position else offset)
                scale = 1.0 / self.position_range
                part = part * torch.as_tensor(scale, dtype=dtype)
                part = part - torch.as_tensor(low * scale, dtype=dtype)
            parts.append(part)
        if self.parameters:
            absent = [name for name in self.parameters if name not in parameters]
            if absent:
                known = ", ".join(parameters) or "none"
                raise DataError(
                    f"the case has no parameter {', '.join(absent)} (data.parameters); it has "
                    f"{known}: put the table that holds them beside the mesh"
                )
            values = np.array([parameters[name] for name in self.parameters], np.float64)
            standard = torch.as_tensor((values - self.parameter_mean) / self.parameter_std)
            parts.append(standard.to(dtype).expand(len(parts[0]), -1))
        return torch.cat(parts, dim=-1)

    def encode_targets(self, fields: Mapping[str, np.ndarray], dtype: torch.dtype) -> Tensor:
        """Standardised targets of n tokens, in the order of `targets`.  -> [n, O]"""
        columns = [
            torch.from_numpy(np.ascontiguousarray(fields[name])).to(dtype).reshape(-1, channels)
            for name, channels in self._target_channels()
        ]
        mean, std = (
            torch.as_tensor(values, dtype=dtype) for values in (self.target_mean, self.target_std)
        )
        return (torch.cat(columns, dim=-1) - mean) / std

    def decode_targets(self, outputs: Tensor) -> dict[str, np.ndarray]:
        """Physical fields of network outputs [n, O], by canonical name, in the outputs' dtype.

        Half precision is widened to float32 first.
        """
        if outputs.dtype != torch.float64:
            outputs = outputs.float()
        mean, std = (
            torch.as_tensor(values, dtype=outputs.dtype, device=outputs.device)
            for values in (self.target_mean, self.target_std)
        )
        physical = (outputs * std + mean).cpu().numpy()
        fields, first = {}, 0
        for name, channels in self._target_channels():
            part = physical[:, first : first + channels]
            fields[name] = np.ascontiguousarray(part if channels > 1 else part[:, 0])
            first += channels
        return fields

    def to_dict(self) -> dict[str, Any]:
        """Plain values for RUN_DIR/config.yaml."""
        return {
            "inputs": list(self.inputs),
            "targets": list(self.targets),
            "relative_position": self.relative_position,
            "position_low": self.position_low.tolist(),
            "position_range": self.position_range.tolist(),
            "target_mean": self.target_mean.tolist(),
            "target_std": self.target_std.tolist(),
        } | (
            {
                "condition": list(self.condition),
                "parameters": list(self.parameters),
                "parameter_mean": self.parameter_mean.tolist(),
                "parameter_std": self.parameter_std.tolist(),
            }
            if self.condition or self.parameters
            else {}
        )

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Normalizer:
        """The inverse of `to_dict`."""
        arrays = ("position_low", "position_range", "target_mean", "target_std")
        return Normalizer(
            inputs=tuple(values["inputs"]),
            targets=tuple(values["targets"]),
            relative_position=bool(values["relative_position"]),
            condition=tuple(values.get("condition", ())),
            parameters=tuple(values.get("parameters", ())),
            **{name: np.asarray(values[name], dtype=np.float64) for name in arrays},
            **{
                name: np.asarray(values[name], dtype=np.float64)
                for name in ("parameter_mean", "parameter_std")
                if name in values
            },
        )

    def _target_channels(self) -> list[tuple[str, int]]:
        return [(name, FIELDS[name].channels) for name in self.targets]


def _deviation(values: Sequence[float]) -> float:
    """Of the values; where they are all the same, 1."""
    deviation = float(np.std(values))
    return deviation if deviation > CONSTANT * np.abs(values).max() else 1.0
