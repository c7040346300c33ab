"""The optimiser, its schedule, and the moving average of the weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from cpflare.config import TrainConfig

_NO_DECAY = ("queries", "gate_logits")


def build_optimizer(model: nn.Module, config: TrainConfig) -> AdamW:
    """AdamW; biases, norms, latent queries and gates are not decayed (the published grouping)."""
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        plain = parameter.ndim < 2 or name.rsplit(".", 1)[-1].endswith(_NO_DECAY)
        (kept if plain else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    on_gpu = any(p.is_cuda for p in model.parameters())
    return AdamW(groups, lr=config.lr, fused=True if on_gpu else None)


def build_schedule(optimizer: AdamW, config: TrainConfig, total_steps: int) -> LRScheduler:
    """The learning rate's course over all steps; `train.warmup` is the rising share of them."""
    if config.schedule == "onecycle":
        # OneCycleLR divides by the length of each phase less one: too short a run needs a floor.
        steps = max(total_steps, 3)
        warmup = min(max(config.warmup, 1.5 / steps), 1 - 1 / steps)
        return OneCycleLR(optimizer, max_lr=config.lr, total_steps=steps, pct_start=warmup)
    rising = max(round(config.warmup * total_steps), 1)

    def factor(step: int) -> float:
        if config.schedule == "constant":
            return 1.0
        if step < rising:
            return (step + 1) / rising
        share = min((step - rising) / max(total_steps - rising, 1), 1.0)
        return 0.5 * (1 + math.cos(math.pi * share))

    return LambdaLR(optimizer, factor)


def take_up(schedule: LRScheduler, step: int) -> float:
    """Put a fresh schedule where it stands after `step` steps; returns the learning rate there."""
    schedule.last_epoch, schedule._step_count = step - 1, step + 1
    schedule.step()
    return float(schedule.get_last_lr()[0])


class MovingAverage:
    """Exponential moving average of the weights:  average += (1 - decay) (weight - average)."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """After each optimiser step; local, since the weights are equal on all ranks."""
        current: list[Tensor] = [p.detach() for p in model.parameters()]
        torch._foreach_lerp_(list(self.weights.values()), current, 1 - self.decay)

    @torch.no_grad()
    def swap(self, model: nn.Module) -> None:
        """Exchange the model's weights and the average; twice gives back both."""
        for name, parameter in model.named_parameters():
            average = self.weights[name]
            kept = parameter.detach().clone()
            parameter.copy_(average)
            average.copy_(kept)
