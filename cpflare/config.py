"""The configuration: read strictly from YAML files and dotted overrides, and checked.

Its keys are declared in `cpflare.sections`.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from cpflare.errors import ConfigError
from cpflare.fields import INPUT_FIELDS, TARGET_FIELDS
from cpflare.files import one_line
from cpflare.schema import build
from cpflare.sections import (
    Config,
    DataConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)

__all__ = [
    "Config",
    "DataConfig",
    "EngineConfig",
    "ModelConfig",
    "ParallelConfig",
    "RunConfig",
    "TrainConfig",
    "config_from_dict",
    "load_config",
    "mixer_names",
    "option_owners",
    "parse_bytes",
]


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
    values = {str(key): value for key, value in merged.items()}
    if "normalizer" in (values.get("dataset") or ()):
        del values["dataset"]  # a run's own file, which also says what it was trained on
    return config_from_dict(values)


def config_from_dict(values: Mapping[str, Any]) -> Config:
    """Build a checked configuration from nested plain values; missing keys take their defaults."""
    sections, values = _sections(values)
    config: Config = build(Config, values, sections)
    _check_fields(config.data)
    _check_model(config.model)
    _check_conditioning(config)
    config.model.check(config.train.precision)
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
    if len({*data.condition} & {*INPUT_FIELDS}) != len(data.condition):
        raise ConfigError(
            f"data.condition={data.condition} must be some of {', '.join(INPUT_FIELDS)}, each once"
        )
    if len({*data.parameters}) != len(data.parameters):
        raise ConfigError(f"data.parameters={data.parameters} must name each parameter once")


def mixer_names() -> list[str]:
    """The registry's names; imported when asked, since mixers are built from configurations."""
    from cpflare.models.mixers import MIXERS

    return list(MIXERS)


def option_owners() -> dict[str, dict[str, type[ModelConfig]]]:
    """The keys of section model that belong to mixers, each with the sections that have it."""
    from cpflare.models.mixers import MIXERS

    common = {item.name for item in dataclasses.fields(ModelConfig)}
    owners: dict[str, dict[str, type[ModelConfig]]] = {}
    for name, kind in MIXERS.items():
        for item in dataclasses.fields(kind.config):
            if item.name not in common:
                owners.setdefault(item.name, {})[name] = kind.config
    return owners


def _sections(values: Mapping[str, Any]) -> tuple[dict[str, type], dict[str, Any]]:
    """The class of section model that a mixer's options need, and the values without other mixers'
    options, which may stand there at their defaults."""
    from cpflare.models.mixers import MIXERS

    values, model = dict(values), values.get("model")
    given = dict(model) if isinstance(model, Mapping) else {}
    mixer = given.get("mixer", ModelConfig.mixer)
    if not isinstance(mixer, str) or mixer not in MIXERS:
        mixer = ModelConfig.mixer  # which mixers there are is said later
        known: set[str] = set(option_owners())
    else:
        known = {item.name for item in dataclasses.fields(MIXERS[mixer].config)}
    for key, owners in option_owners().items():
        if key in given and key not in known:
            if given[key] not in [getattr(kind(), key) for kind in owners.values()]:
                raise ConfigError(
                    f"model.{key}={given[key]} is an option of model.mixer={' | '.join(owners)}, "
                    f"not of {mixer}; leave it out"
                )
            del given[key]
    if isinstance(model, Mapping):
        values["model"] = given
    return {"model": MIXERS[mixer].config}, values


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


def _check_conditioning(config: Config) -> None:
    from cpflare.models.mixers import MIXERS

    kind, given = config.model.conditioning, config.condition_channels > 0
    if kind == "none" and given:
        raise ConfigError(
            "data.condition and data.parameters condition nothing with model.conditioning=none; "
            "set model.conditioning, for example to in_context or padanorm"
        )
    if kind != "none" and not given:
        raise ConfigError(
            f"model.conditioning={kind} needs data.condition or data.parameters; name some"
        )
    complete = MIXERS[config.model.mixer].parts is not None
    if complete and kind not in ("none", "in_context"):
        raise ConfigError(
            f"model.conditioning={kind} goes with mixers of the shared backbone, and "
            f"model.mixer={config.model.mixer} is a whole architecture; set in_context"
        )


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
