"""Fields to network inputs and back: min-max scaled position, unit normal, standardised targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cpflare.config import Config
from cpflare.data.statistics import Statistics
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

    @staticmethod
    def from_statistics(config: Config, statistics: Statistics) -> Normalizer:
        """The maps for a configuration's inputs, targets and kind of position."""
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
            target_mean=np.concatenate([field.mean for field in targets]),
            target_std=np.concatenate([np.maximum(field.std, _FLOOR) for field in targets]),
        )

    def encode_inputs(
        self, fields: Mapping[str, np.ndarray], offset: np.ndarray, dtype: torch.dtype
    ) -> Tensor:
        """Network inputs of n tokens.  `position` is centred: without the case's `offset` [3]. ->
        [n, F]

        The offset is folded into the bounds in float64, so that a mesh far from the origin loses no
        digits: what is scaled in the run's dtype is the small centred position.
        """
        parts = []
        for name in self.inputs:
            part = torch.from_numpy(np.ascontiguousarray(fields[name])).to(dtype)
            if name == "position":
                low = self.position_low - (0.0 if self.relative_position else offset)
                scale = 1.0 / self.position_range
                part = part * torch.as_tensor(scale, dtype=dtype)
                part = part - torch.as_tensor(low * scale, dtype=dtype)
            parts.append(part)
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
        }

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Normalizer:
        """The inverse of `to_dict`."""
        arrays = ("position_low", "position_range", "target_mean", "target_std")
        return Normalizer(
            inputs=tuple(values["inputs"]),
            targets=tuple(values["targets"]),
            relative_position=bool(values["relative_position"]),
            **{name: np.asarray(values[name], dtype=np.float64) for name in arrays},
        )

    def _target_channels(self) -> list[tuple[str, int]]:
        return [(name, FIELDS[name].channels) for name in self.targets]
