"""Grids of points: of models, sizes, ranks and the rest, from a study's YAML file or options."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cpflare.errors import ConfigError
from cpflare.scaling.protocol import Protocol
from cpflare.scaling.study import Point

_LOCAL = ("local", 0.0, 0.0)


def grid(
    *,
    models: Sequence[str],
    tokens: Sequence[int],
    ranks: Sequence[int],
    precisions: Sequence[str] = ("fp32",),
    executors: Sequence[str] = ("in_memory",),
    methods: Sequence[str] = ("ours",),
    networks: Sequence[Sequence[Any]] = (_LOCAL,),
    overrides: Sequence[str] = (),
) -> Iterator[Point]:
    """All combinations. A single rank has no peers and no network: it is measured once."""
    every = itertools.product(models, tokens, precisions, executors, ranks)
    for model, size, precision, executor, count in every:
        peers = itertools.product(methods, networks) if count > 1 else [("ours", _LOCAL)]
        for method, network in peers:
            family = (model, size, precision, executor, tuple(overrides))
            point = Point(*family, count, method, *network)
            point.config()
            yield point


def points_of(grids: Iterable[Mapping[str, Any]], overrides: Sequence[str] = ()) -> list[Point]:
    """The points of several grids, each once; `overrides` hold for all."""
    keys = [{**entry, "overrides": [*entry.get("overrides", ()), *overrides]} for entry in grids]
    return list(dict.fromkeys(point for entry in keys for point in grid(**entry)))


def read_study_file(path: Path) -> dict[str, Any]:
    """A study's YAML file: title, protocol, grids. Raises ConfigError for what it may not hold."""
    import yaml

    try:
        plan = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        line = " ".join(str(error).split())
        raise ConfigError(f"study file {path} cannot be read ({line})") from error
    if not isinstance(plan, dict) or not isinstance(plan.get("grids"), list):
        raise ConfigError(f"study file {path} needs a list 'grids:' of models, tokens and ranks")
    _known(path, plan, {"title", "protocol", "grids"})
    _known(path, plan.get("protocol", {}), {item.name for item in dataclasses.fields(Protocol)})
    for entry in plan["grids"]:
        _known(path, entry, set(inspect.signature(grid).parameters))
    return plan


def _known(path: Path, values: Mapping[str, Any], known: set[str]) -> None:
    for key in values:
        if key not in known:
            raise ConfigError(
                f"study file {path} has an unknown key '{key}'; known: {', '.join(sorted(known))}"
            )
