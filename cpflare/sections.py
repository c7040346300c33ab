"""The configuration's keys: each with its type, its limits, a sentence and its default.

Errors, --help and docs/config.md are worded from here; `cpflare.config` reads and checks them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from cpflare.fields import INPUT_FIELDS, TARGET_FIELDS, channels_of
from cpflare.schema import Count, Finite, Number, Positive, Section, Switch, Whole


@dataclass(frozen=True)
class DataConfig(Section):
    """What is read."""

    store: Annotated[str, "the prepared store"] = "data/quickstart/store"
    train_split: Annotated[str | list[str], "a split's name, or a list of cases"] = "train"
    val_split: Annotated[str | list[str], "a split's name, or a list of cases"] = "val"
    tokens: Annotated[Count | Literal["all"], "cells of a case and step"] = 100_000
    inputs: Annotated[list[str], "fields to read"] = field(default_factory=lambda: [*INPUT_FIELDS])
    targets: Annotated[list[str], "fields to predict"] = field(
        default_factory=lambda: [*TARGET_FIELDS]
    )
    condition: Annotated[list[str], "fields that condition the model (model.conditioning)"] = field(
        default_factory=list
    )
    parameters: Annotated[
        list[str], "parameters of the case that condition it, as the store names them"
    ] = field(default_factory=list)
    position: Annotated[
        Literal["absolute", "relative"], "relative: minus the bounding box's centre"
    ] = "absolute"


@dataclass(frozen=True)
class ModelConfig(Section):
    """The network; the defaults are the published full-surface setting.

    A mixer with options of its own has a subclass, which adds them (`cpflare.models.mixers`).
    """

    mixer: Annotated[str, "how tokens communicate; none, for ablations: not at all"] = "flarepp"
    channels: Annotated[Count, "width of a token, a multiple of model.heads"] = 128
    heads: Annotated[Count, "heads of the attention"] = 8
    blocks: Annotated[Count, "number of blocks: a mixer and a feed-forward layer each"] = 8
    latents: Annotated[Count, "latents of a head"] = 64
    ffn_ratio: Annotated[Finite, "width of feed-forward layers over model.channels"] = 2.0
    norm: Annotated[
        Literal["auto", "layernorm", "rmsnorm"],
        "auto, as published: LayerNorm in fp32 and fp64 runs, RMSNorm in mixed precision",
    ] = "auto"
    dropout: Annotated[Number, Ge(0), Lt(1), "share of values that training sets to 0"] = 0.0
    conditioning: Annotated[
        Literal["none", "in_context", "global", "padanorm", "cross_attention"],
        "how data.condition and data.parameters reach the model",
    ] = "none"
    conditioning_width: Annotated[Count | None, "of their encoding; null: model.channels"] = None
    conditioning_layers: Annotated[Count, "linear layers of the encoder of the conditions"] = 4
    conditioning_latents: Annotated[
        Count | None, "of cross_attention, for each head; null: model.latents"
    ] = None
    modulation_sites: Annotated[
        Literal["both", "mixer", "ffn"], "parts of a block that global and padanorm modulate"
    ] = "both"
    modulation_shared: Annotated[
        Literal["auto", "none", "sites", "all"],
        "who shares a projection: no block, all blocks, or all their parts as well; auto: none for "
        "padanorm, all for global",
    ] = "auto"
    modulation_gate: Annotated[
        Literal["one", "zero"], "a part's factor is 1 + gamma, or gamma, which starts at 0"
    ] = "one"

    def check(self, precision: str) -> None:
        """What a mixer's own options ask of the rest. Raises ConfigError where it is not given."""


@dataclass(frozen=True)
class ParallelConfig(Section):
    """How ranks are split; without keys, all share each case."""

    cp: Annotated[Count | None, "ranks that share a case"] = None
    dp: Annotated[Count | None, "replicas, which take different cases"] = None
    timeout_s: Annotated[Positive, "seconds that ranks wait for one that is silent"] = 600.0
    device: Annotated[
        Literal["auto", "cpu", "cuda"], "where ranks compute; auto: a GPU each where there are any"
    ] = "auto"


@dataclass(frozen=True)
class EngineConfig(Section):
    """How the blocks are executed."""

    executor: Annotated[
        Literal["in_memory", "streamed"],
        "streamed: only block inputs are kept, the rest is recomputed chunk by chunk",
    ] = "in_memory"
    chunk_tokens: Annotated[Count | None, "tokens of a chunk; null: what caches hold"] = None
    memory_limit: Annotated[Whole | str | None, "bounds a prediction: bytes, or as 6GiB"] = None
    recompute: Annotated[
        Literal["none", "pointwise"] | Whole,
        "pointwise: in memory, only latents and block inputs are kept; "
        "k: streamed, only every k-th block input",
    ] = "none"
    offload: Annotated[
        Literal["none", "bf16", "host"],
        "of streamed block inputs: bf16, kept in half precision; host, in the host's memory",
    ] = "none"
    compile: Annotated[
        Switch, "torch.compile token-local parts; the first step then takes a while"
    ] = False


@dataclass(frozen=True)
class TrainConfig(Section):
    """The optimisation."""

    steps: Annotated[Count | None, "optimiser steps; train.epochs does not count then"] = None
    epochs: Annotated[Count, "times that each training case is taken"] = 500
    cases_per_step: Annotated[
        Count | None, "cases of a step, a multiple of parallel.dp; null: as many"
    ] = None
    loss: Annotated[Literal["mse", "rel_l2"], "taken of normalised targets"] = "mse"
    lr: Annotated[Positive, "the highest learning rate"] = 1e-3
    schedule: Annotated[
        Literal["onecycle", "cosine", "constant"], "course of the learning rate"
    ] = "onecycle"
    warmup: Annotated[Number, Gt(0), Lt(1), "share of steps in which the rate rises"] = 0.1
    weight_decay: Annotated[Number, Ge(0), "of AdamW"] = 1e-4
    clip: Annotated[Number, Ge(0), "limit of the gradient's norm; 0: none"] = 1.0
    precision: Annotated[
        Literal["fp32", "bf16", "fp16", "fp64"], "bf16 and fp16 are mixed: weights stay fp32"
    ] = "fp32"
    seed: Annotated[Whole, Ge(0), "draws weights, order, windows and dropout"] = 0
    ema: Annotated[Number, Ge(0), Lt(1), "decay of a moving average of the weights; 0: off"] = 0.0
    checkpoint_every: Annotated[
        Whole, Ge(0), "steps between checkpoints; 0: best ones and the last"
    ] = 500
    keep: Annotated[Whole, Ge(1), "checkpoints that stay"] = 2
    eval_every: Annotated[Whole, Ge(0), "steps between evaluations; 0: at the end alone"] = 500
    eval_cases: Annotated[Whole, Ge(0), "cases of an evaluation before the end; 0: all"] = 4
    eval_tokens: Annotated[Count | Literal["all"], "cells of such a case"] = 100_000
    resume: Annotated[str, "auto: from the newest checkpoint; never; or a checkpoint"] = "auto"
    init_from: Annotated[
        str | None, "a run's folder, whose weights a new run starts with; all else is its own"
    ] = None
    nonfinite: Annotated[
        Literal["stop", "skip"], "what a step without finite loss and gradient does"
    ] = "stop"
    deterministic: Annotated[Switch, "the same bits again, with slower operations"] = False
    tensorboard: Annotated[Switch, "also write RUN_DIR/tensorboard/"] = False


@dataclass(frozen=True)
class RunConfig(Section):
    """Where the run's files go."""

    dir: Annotated[str, "folder of the run"] = "runs/latest"


@dataclass(frozen=True)
class Config(Section):
    """A whole run."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, as written into RUN_DIR/config.yaml."""
        return dataclasses.asdict(self)

    @property
    def input_channels(self) -> int:
        """Channels that the network reads; the last of them are the conditions'."""
        return channels_of(self.data.inputs) + self.condition_channels

    @property
    def condition_channels(self) -> int:
        return channels_of(self.data.condition) + len(self.data.parameters)

    @property
    def target_channels(self) -> int:
        return channels_of(self.data.targets)
