"""The model: input projection, steps (blocks of a mixer and a feed-forward network), head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cpflare.config import Config, ModelConfig, config_from_dict, load_config
from cpflare.fields import channels_of
from cpflare.models.conditioning import build_conditioning, is_steered, with_conditions
from cpflare.models.layers import initialise_linear
from cpflare.models.mixers import build_parts
from cpflare.models.site import Site
from cpflare.models.step import Block, Step
from cpflare.ops import Reducer

__all__ = ["Backbone", "Block", "Executor", "Site", "Step", "build_model", "run_whole"]


class Backbone(nn.Module):
    """A surrogate: fields of this rank's tokens in, fields of the same tokens out.

    The forward knows no rank: `reducer` is all that lets tokens meet, and the default one stands
    for a single rank (`cpflare.engine.parallelize` sets another). It knows no chunks either:
    `cpflare.engine.configure` sets the `executor` that runs the parts over them; without one the
    model runs as it reads, over all its tokens at once.
    """

    def __init__(
        self,
        config: ModelConfig,
        in_channels: int,
        out_channels: int,
        *,
        seed: int = 0,
        position: slice | None = None,
        conditions: int = 0,
    ) -> None:
        """`conditions` are the last of the `in_channels`: what the model is conditioned by."""
        super().__init__()
        self.mixer_name = config.mixer
        self.width, self.dropout, self.seed = config.channels, config.dropout, seed
        self.in_channels, self.out_channels, self.position = in_channels, out_channels, position
        # Of the inputs, how many the input projection reads; the conditioning reads the others.
        self.embedded = in_channels - conditions if is_steered(config) else in_channels
        parts = build_parts(config, self.embedded, out_channels)
        self.in_proj = parts.in_proj
        self.blocks = nn.ModuleList(parts.steps)
        self.out_norm = parts.out_norm
        self.out_proj = parts.out_proj
        self.reducer = Reducer()
        self.executor: Executor | None = None
        self.chunk_tokens: int | None = None  # the executor's; None: the device's default
        if parts.initialise:
            self.apply(initialise_linear)
        self.conditioning = build_conditioning(config, conditions)
        # Steps may share modules; in a state dict each weight stands once, under its first name.
        self.register_state_dict_post_hook(_drop_aliases)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_add_aliases)  # type: ignore[no-untyped-call]

    @property
    def steps(self) -> list[Step]:
        """The blocks, or the steps of a complete architecture, in order."""
        return list(self.blocks)  # type: ignore[arg-type]

    @property
    def widest(self) -> int:
        """Values a token of the widest tensor that a chunk makes, which bounds its length."""
        return max([self.width, *(step.widest for step in self.steps)])

    @property
    def needs(self) -> frozenset[str]:
        """What the steps read of the site, in the mode (training or not) that is on."""
        return frozenset().union(*(step.needs for step in self.steps))

    def forward(self, inputs: Tensor, rows: Tensor | None = None, step: int = 0) -> Tensor:
        """Predict this rank's tokens.

        inputs [B, n, F] or [n, F] -> outputs [B, n, O] or [n, O]; n may differ between ranks and be
        0. `rows` [n] int64, the tokens' global rows, and `step` are what dropout and other noise
        are functions of; the rows are needed only where there is any.

        Communication: the reductions of the mixers, in order, after one all-gather of an integer
        where a mixer needs the tokens' places; every rank must call it.

        Raises:
            ValueError: the inputs' channels or the rows' count do not fit, or rows or positions
            that are needed are missing.
        """
        if inputs.ndim not in (2, 3) or inputs.shape[-1] != self.in_channels:
            raise ValueError(
                f"inputs of shape {list(inputs.shape)} do not fit; the model reads [B, n, "
                f"{self.in_channels}]"
            )
        batched = inputs if inputs.ndim == 3 else inputs[None]
        site = self.site_of(batched, rows, step)
        outputs = (self.executor or run_whole)(self, batched, site)
        return outputs if inputs.ndim == 3 else outputs[0]

    def embed(self, inputs: Tensor) -> Tensor:
        """The input projection of a chunk.  [B, n, F] -> [B, n, C]"""
        x: Tensor = self.in_proj(inputs[..., : self.embedded])
        return x

    def conditions(self, inputs: Tensor) -> Tensor:
        """The channels that the conditioning reads.  [B, n, F] -> [B, n, F_c]"""
        return inputs[..., self.embedded :]

    def head(self, x: Tensor) -> Tensor:
        """The output head of a chunk.  [B, n, C] -> [B, n, O]"""
        out: Tensor = self.out_proj(self.out_norm(x))
        return out

    def site_of(self, inputs: Tensor, rows: Tensor | None, step: int) -> Site:
        """What the steps want to know of this rank's tokens, inputs [B, n, F]; see `forward`."""
        dropout = self.dropout if self.training else 0.0
        needs = self.needs
        if dropout == 0 and not needs:
            return Site()
        num_tokens = inputs.shape[1]
        if (dropout or "rows" in needs) and (rows is None or rows.shape[0] != num_tokens):
            what = f"model.dropout={dropout}" if dropout else "the mixer's noise"
            raise ValueError(
                f"{what} needs the rows of the {num_tokens} tokens, got "
                f"{None if rows is None else list(rows.shape)}; pass rows="
            )
        if "positions" in needs and self.position is None:
            raise ValueError("the mixer needs positions; name position in data.inputs")
        offset, total = self.reducer.place(num_tokens) if "place" in needs else (0, 0)
        return Site(
            rows if dropout or "rows" in needs else None,
            dropout,
            self.seed,
            step,
            inputs=inputs if needs & {"inputs", "positions"} else None,
            position=self.position,
            offset=offset,
            total=total,
        )


def aliases(model: nn.Module) -> dict[str, str]:
    """Further names of parameters that steps share, each with the first one."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    names = {name: first.setdefault(id(p), name) for name, p in named}
    return {name: known for name, known in names.items() if name != known}


def _drop_aliases(model: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    for name in aliases(model):
        state.pop(prefix + name, None)


def _add_aliases(model: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    for name, known in aliases(model).items():
        if prefix + known in state:
            state[prefix + name] = state[prefix + known]


Executor = Callable[[Backbone, Tensor, Site], Tensor]
"""Runs a model over this rank's tokens: inputs [B, n, F] -> outputs [B, n, O]."""


def run_whole(model: Backbone, inputs: Tensor, site: Site) -> Tensor:
    """All tokens at once by ordinary autograd: what the model means, and nothing of how it runs."""
    x = model.embed(inputs)
    if model.conditioning is not None:
        c = model.conditions(inputs)
        (site,) = with_conditions(model.conditioning, [c], [site], model.reducer)
    for step in model.steps:
        x = step(x, model.reducer, site)
    return model.head(x)


def _position(inputs: Sequence[str]) -> slice | None:
    """The channels of the position among the inputs'."""
    if "position" not in inputs:
        return None
    start = channels_of(inputs[: inputs.index("position")])
    return slice(start, start + channels_of(["position"]))


def build_model(config: Config | Mapping[str, Any] | str) -> Backbone:
    """A model with fresh weights drawn from `train.seed`, equal on every rank and for every dtype.

    `config` is a configuration, nested plain values of one, or a YAML file. Weights are drawn in
    fp32 on the CPU and then cast (fp64 runs); the caller moves the model to its device.

    Raises:
        ConfigError: keys or values that cannot be used.
    """
    if isinstance(config, str):
        config = load_config(config)
    elif not isinstance(config, Config):
        config = config_from_dict(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        model = Backbone(
            config.model,
            config.input_channels,
            config.target_channels,
            seed=config.train.seed,
            position=_position(config.data.inputs),
            conditions=config.condition_channels,
        )
    return model.double() if config.train.precision == "fp64" else model
