"""The configuration: frozen dataclasses, read strictly from YAML files and dotted overrides.

Each key stands with its type, its limits, a sentence and its default; errors, --help and
docs/config.md are worded from there.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from cpflare.errors import ConfigError
from cpflare.fields import INPUT_FIELDS, TARGET_FIELDS, channels_of
from cpflare.files import one_line
from cpflare.schema import Count, Finite, Number, Positive, Section, Switch, Whole, build


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
    position: Annotated[
        Literal["absolute", "relative"], "relative: minus the bounding box's centre"
    ] = "absolute"


@dataclass(frozen=True)
class ModelConfig(Section):
    """The network; the defaults are the published full-surface setting."""

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
    query: Annotated[
        Literal["gated", "pure"], "pure: latent queries come from the tokens alone"
    ] = "gated"
    synthesis: Annotated[
        Literal["shared", "separate", "tied"], "projections that synthesise latent queries"
    ] = "shared"
    gate_init: Annotated[Finite, "first value of the gate of model.query=gated"] = 0.25
    dropout: Annotated[Number, Ge(0), Lt(1), "share of values that training sets to 0"] = 0.0


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
        return channels_of(self.data.inputs)

    @property
    def target_channels(self) -> int:
        return channels_of(self.data.targets)


def load_config(source: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file (a path, or the name of a shipped one) and apply `key=value` overrides.

    Raises:
        ConfigError: the file is absent or no YAML mapping, a key is unknown (the nearest known key
            is named), a value has the wrong type or is out of range.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        loaded = OmegaConf.load(_config_path(source)) if source is not None else OmegaConf.create()
        if not OmegaConf.is_dict(loaded):
            raise ConfigError(f"configuration {source} is a list; it needs sections such as model:")
        merged = OmegaConf.to_container(OmegaConf.merge(loaded, _dotted(overrides)), resolve=True)
    except (OmegaConfBaseException, YAMLError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"configuration {source}: {one_line(error)}; mend the file or the overrides"
        ) from None
    assert isinstance(merged, dict)
    return config_from_dict({str(key): value for key, value in merged.items()})


def config_from_dict(values: Mapping[str, Any]) -> Config:
    """Build a checked configuration from nested plain values; missing keys take their defaults."""
    config: Config = build(Config, values)
    _check_fields(config.data)
    _check_model(config.model)
    _check_engine(config.engine)
    if config.model.norm != "auto":
        return config
    norm: Literal["layernorm", "rmsnorm"] = (
        "rmsnorm" if config.train.precision in ("bf16", "fp16") else "layernorm"
    )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, norm=norm))


def _config_path(source: str | Path) -> Path:
    path = Path(source)
    if path.is_file():
        return path
    shipped = resources.files("cpflare.configs")
    names = sorted(p.name for p in shipped.iterdir() if p.name.endswith(".yaml"))
    for name in (path.name, f"{path.name}.yaml"):
        # A bare name picks a shipped file; a path that a user spelled out must exist as spelled.
        if name in names and str(path) in (path.name, f"configs/{path.name}"):
            return Path(str(shipped / name))
    raise ConfigError(
        f"configuration {source} does not exist; give a YAML file or one of {', '.join(names)}"
    )


def _dotted(overrides: Sequence[str]) -> Any:
    from omegaconf import OmegaConf

    for text in overrides:
        key, equals, _ = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(
                f"override '{text}' is not key=value; write for example train.lr=1e-3"
            )
    return OmegaConf.from_dotlist([text.strip() for text in overrides])


def _check_fields(data: DataConfig) -> None:
    for key, names, known in (
        ("data.inputs", data.inputs, INPUT_FIELDS),
        ("data.targets", data.targets, TARGET_FIELDS),
    ):
        if not names or len({*names} & {*known}) != len(names):
            raise ConfigError(f"{key}={names} must be one or more of {', '.join(known)}, each once")


def mixer_names() -> list[str]:
    """The registry's names; imported when asked, since mixers are built from configurations."""
    from cpflare.models.mixers import MIXERS

    return list(MIXERS)


def _check_model(model: ModelConfig) -> None:
    if model.mixer not in mixer_names():
        near = difflib.get_close_matches(model.mixer, mixer_names(), n=1)
        raise ConfigError(
            f"model.mixer={model.mixer!r} must be {' | '.join(mixer_names())}"
            + "".join(f"; did you mean {name}?" for name in near)
        )
    if model.channels % model.heads:
        raise ConfigError(
            f"model.channels={model.channels} is not divisible by model.heads={model.heads}; "
            f"take for example model.channels={-(-model.channels // model.heads) * model.heads}"
        )
    if int(model.channels * model.ffn_ratio) < 1:
        raise ConfigError(f"model.ffn_ratio={model.ffn_ratio} must be at least 1/{model.channels}")


def _check_engine(engine: EngineConfig) -> None:
    parse_bytes(engine.memory_limit)
    recompute = engine.recompute
    if isinstance(recompute, int) and (recompute < 1 or engine.executor != "streamed"):
        raise ConfigError(
            f"engine.recompute={recompute} keeps every k-th block input of the streamed executor; "
            "set engine.executor=streamed and k of at least 1"
        )
    if recompute == "pointwise" and engine.executor != "in_memory":
        raise ConfigError(
            "engine.recompute=pointwise is what the streamed executor does anyway; leave it "
            "out, or set engine.executor=in_memory"
        )
    if engine.offload != "none" and engine.executor != "streamed":
        raise ConfigError(
            f"engine.offload={engine.offload} moves block inputs of the streamed executor; set "
            "engine.executor=streamed"
        )


_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_bytes(value: int | str | None) -> int | None:
    """A number of bytes, or a text such as 6GiB.  Raises ConfigError for anything else."""
    if value is None or isinstance(value, int):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([A-Za-z]*)\s*", value)
    unit = _UNITS.get(match[2] or "B") if match else None
    if not match or not unit:
        raise ConfigError(f"engine.memory_limit={value} must be bytes or a size such as 6GiB")
    return int(float(match[1]) * unit)
