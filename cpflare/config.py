"""The configuration: frozen dataclasses, read strictly from YAML files and dotted overrides."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from cpflare.errors import ConfigError
from cpflare.files import one_line

FIELD_CHANNELS: dict[str, int] = {"position": 3, "normal": 3, "pressure": 1, "wall_shear": 3}
"""Channels of each canonical field that a model may read or predict."""

INPUT_FIELDS = ("position", "normal")
TARGET_FIELDS = ("pressure", "wall_shear")


@dataclass(frozen=True)
class DataConfig:
    """What is read: `tokens` cells a case and step, or "all" of them."""

    store: str = "data/quickstart/store"
    train_split: str | list[str] = "train"
    val_split: str | list[str] = "val"
    tokens: int | Literal["all"] = 100_000
    inputs: list[str] = field(default_factory=lambda: list(INPUT_FIELDS))
    targets: list[str] = field(default_factory=lambda: list(TARGET_FIELDS))
    position: Literal["absolute", "relative"] = "absolute"


@dataclass(frozen=True)
class ModelConfig:
    """The network. The defaults are the published full-surface setting.

    `norm: auto` is the published rule: LayerNorm in fp32 and fp64 runs, RMSNorm in mixed precision.
    `mixer: none` is the backbone without communication between tokens, for ablations.
    """

    mixer: Literal["flare", "flarepp", "none"] = "flarepp"
    channels: int = 128
    heads: int = 8
    blocks: int = 8
    latents: int = 64
    ffn_ratio: float = 2.0
    norm: Literal["auto", "layernorm", "rmsnorm"] = "auto"
    query: Literal["gated", "pure"] = "gated"
    synthesis: Literal["shared", "separate", "tied"] = "shared"
    gate_init: float = 0.25
    dropout: float = 0.0


@dataclass(frozen=True)
class ParallelConfig:
    """How ranks are split: `cp` ranks share a case, `dp` replicas take different cases."""

    cp: int | None = None
    dp: int | None = None
    timeout_s: float = 600.0


@dataclass(frozen=True)
class EngineConfig:
    """How the blocks are executed.

    `executor: streamed` keeps block inputs alone and recomputes the rest chunk by chunk.
    `chunk_tokens` null takes what the device's caches hold. `recompute`: none; pointwise, the
    in-memory executor keeps latents and block inputs alone; k, the streamed one keeps every k-th
    block input. `offload`: none; bf16, block inputs in half precision; host, in the host's memory.
    `memory_limit` in bytes (or as 6GiB) bounds a prediction. `compile` compiles the token-local
    parts with torch.compile; the first step then takes a while.
    """

    executor: Literal["in_memory", "streamed"] = "in_memory"
    chunk_tokens: int | None = None
    memory_limit: int | str | None = None
    recompute: Literal["none", "pointwise"] | int = "none"
    offload: Literal["none", "bf16", "host"] = "none"
    compile: bool = False


@dataclass(frozen=True)
class TrainConfig:
    """The optimisation.

    Exactly one of `steps` and `epochs` counts; `steps` wins where both stand.
    """

    steps: int | None = None
    epochs: int = 500
    cases_per_step: int | None = None
    loss: Literal["mse", "rel_l2"] = "mse"
    lr: float = 1e-3
    schedule: Literal["onecycle", "cosine", "constant"] = "onecycle"
    warmup: float = 0.1
    weight_decay: float = 1e-4
    clip: float = 1.0
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    seed: int = 0
    ema: float = 0.0
    checkpoint_every: int = 500
    keep: int = 2
    eval_every: int = 500
    eval_cases: int = 4
    eval_tokens: int | Literal["all"] = 100_000
    resume: str = "auto"
    nonfinite: Literal["stop", "skip"] = "stop"
    deterministic: bool = False
    tensorboard: bool = False


@dataclass(frozen=True)
class RunConfig:
    """Where the run's files go."""

    dir: str = "runs/latest"


@dataclass(frozen=True)
class Config:
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
        return sum(FIELD_CHANNELS[name] for name in self.data.inputs)

    @property
    def target_channels(self) -> int:
        return sum(FIELD_CHANNELS[name] for name in self.data.targets)


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
    config: Config = _build(Config, values, prefix="")
    return _resolve(config)


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


def _build(kind: Any, values: Any, prefix: str) -> Any:
    """Fill dataclass `kind` from a mapping, refusing unknown keys and wrong types by name."""
    if values is None:
        values = {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"{prefix.rstrip('.')}={values!r} must be a section with keys below it")
    hints = typing.get_type_hints(kind)
    for key, value in values.items():
        if key not in hints:
            below = next(iter(value), "") if isinstance(value, Mapping) and not prefix else ""
            raise ConfigError(_unknown(f"{prefix}{key}", below))
    arguments = {}
    for key, value in values.items():
        if dataclasses.is_dataclass(hints[key]):
            arguments[key] = _build(hints[key], value, f"{prefix}{key}.")
        else:
            arguments[key] = _convert(f"{prefix}{key}", hints[key], value)
    return kind(**arguments)


def _known_keys() -> list[str]:
    sections = typing.get_type_hints(Config)
    return [f"{name}.{f.name}" for name, kind in sections.items() for f in dataclasses.fields(kind)]


def _unknown(key: str, below: str = "") -> str:
    """What to say of an unknown key; `below` is the first key of an unknown section."""
    wanted = f"{key}.{below}" if below else key
    known = _known_keys()
    by_name = [name for name in known if name.split(".")[1] == wanted.split(".")[-1]]
    near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.7)
    hint = (by_name or near or [""])[0]
    mend = f"did you mean {hint}?" if hint else "train_cp.py --help lists the keys"
    return f"unknown config key '{wanted}'; {mend}"


def _convert(key: str, hint: Any, value: Any) -> Any:
    """Check `value` against a type hint; an int where a float is wanted is converted."""
    options = typing.get_args(hint) if typing.get_origin(hint) in _UNIONS else (hint,)
    for option in options:
        match = _match(option, value)
        if match is not None or (option is type(None) and value is None):
            return match
    wanted = " or ".join(_describe(option) for option in options)
    raise ConfigError(f"{key}={value!r} must be {wanted}")


_UNIONS = (typing.Union, types.UnionType)


def _match(option: Any, value: Any) -> Any:
    """The value as `option` has it, or None where it does not fit."""
    if typing.get_origin(option) is Literal:
        return value if value in typing.get_args(option) else None
    if typing.get_origin(option) is list:
        is_names = isinstance(value, list) and all(isinstance(item, str) for item in value)
        return list(value) if is_names else None
    if option is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if option is int and isinstance(value, int | float) and not isinstance(value, bool):
        return int(value) if math.isfinite(value) and int(value) == value else None
    if option in (bool, str) and isinstance(value, option):
        return value
    return None


def _describe(option: Any) -> str:
    if typing.get_origin(option) is Literal:
        return " | ".join(str(arg) for arg in typing.get_args(option))
    if typing.get_origin(option) is list:
        return "a list of names"
    if option is type(None):
        return "null"
    return {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}[option]


def _resolve(config: Config) -> Config:
    """Check ranges and fill what depends on other keys (the norm, on the precision)."""
    data, model, train = config.data, config.model, config.train
    _require(data.tokens == "all" or int(data.tokens) > 0, "data.tokens", data.tokens, "positive")
    eval_tokens = train.eval_tokens
    _require(
        eval_tokens == "all" or int(eval_tokens) > 0, "train.eval_tokens", eval_tokens, "positive"
    )
    for key, names, known in (
        ("data.inputs", data.inputs, INPUT_FIELDS),
        ("data.targets", data.targets, TARGET_FIELDS),
    ):
        allowed = bool(names) and set(names) <= set(known) and len(set(names)) == len(names)
        _require(allowed, key, names, f"one or more of {', '.join(known)}, each once")
    for key in ("channels", "heads", "blocks", "latents"):
        _require(getattr(model, key) > 0, f"model.{key}", getattr(model, key), "positive")
    if model.channels % model.heads:
        raise ConfigError(
            f"model.channels={model.channels} is not divisible by model.heads={model.heads}; "
            f"take for example model.channels={-(-model.channels // model.heads) * model.heads}"
        )
    wide = math.isfinite(model.ffn_ratio) and int(model.channels * model.ffn_ratio) >= 1
    _require(wide, "model.ffn_ratio", model.ffn_ratio, f"at least 1/{model.channels}")
    _require(math.isfinite(model.gate_init), "model.gate_init", model.gate_init, "finite")
    _require(0 <= model.dropout < 1, "model.dropout", model.dropout, "at least 0 and below 1")
    for key in ("cp", "dp"):
        value = getattr(config.parallel, key)
        _require(value is None or value > 0, f"parallel.{key}", value, "positive")
    timeout = config.parallel.timeout_s
    _require(0 < timeout < math.inf, "parallel.timeout_s", timeout, "positive and finite")
    for key in ("steps", "cases_per_step"):
        value = getattr(train, key)
        _require(value is None or value > 0, f"train.{key}", value, "positive")
    for key in ("epochs", "lr"):
        value = getattr(train, key)
        _require(0 < value < math.inf, f"train.{key}", value, "positive and finite")
    for key in ("weight_decay", "clip", "checkpoint_every", "eval_every", "eval_cases", "seed"):
        value = getattr(train, key)
        _require(value >= 0, f"train.{key}", value, "at least 0")
    _require(train.keep >= 1, "train.keep", train.keep, "at least 1")
    _require(0 <= train.ema < 1, "train.ema", train.ema, "at least 0 (off) and below 1")
    _require(0 < train.warmup < 1, "train.warmup", train.warmup, "a share between 0 and 1")
    if model.norm == "auto":
        norm: Literal["layernorm", "rmsnorm"] = (
            "rmsnorm" if train.precision in ("bf16", "fp16") else "layernorm"
        )
        config = dataclasses.replace(config, model=dataclasses.replace(model, norm=norm))
    return config


def _require(holds: bool, key: str, value: Any, wanted: str) -> None:
    if not holds:
        raise ConfigError(f"{key}={value} must be {wanted}")
