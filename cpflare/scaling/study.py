"""A scaling study: its points, and the file that keeps every raw sample of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from cpflare.config import Config, load_config
from cpflare.errors import ConfigError, DataError
from cpflare.files import one_line, written_aside
from cpflare.scaling.machine import describe_machine

SCHEMA = 1
METHODS = ("ours", "textbook", "per_parameter", "gather", "ddp", "separate")
NETWORKS = ("local", "hosts", "emulated")


@dataclass(frozen=True, order=True)
class Point:
    """One measurement: a model on a number of tokens and ranks.

    `method` is how tokens and gradients travel: ours, or one of those of `cpflare.scaling.peers`.
    `network`: local, all ranks on one host; hosts, each rank on a host of its own (a network
    namespace) behind a link of `latency_ms` one way and `rate_mbit` (0: unlimited); emulated, a
    wait of `latency_ms` before each collective.
    """

    model: str
    tokens: int
    precision: str = "fp32"
    executor: str = "in_memory"
    overrides: tuple[str, ...] = ()
    ranks: int = 1
    method: str = "ours"
    network: str = "local"
    latency_ms: float = 0.0
    rate_mbit: float = 0.0

    def __post_init__(self) -> None:
        for key, known in (("method", METHODS), ("network", NETWORKS)):
            if getattr(self, key) not in known:
                raise ConfigError(f"{key} {getattr(self, key)} must be one of {', '.join(known)}")
        for key in ("tokens", "ranks"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key} {getattr(self, key)} must be at least 1")
        if self.network == "hosts" and self.ranks != 2:
            raise ConfigError(f"ranks {self.ranks}: network hosts joins 2 hosts of one rank each")
        if self.method == "gather" and self.tokens % self.ranks:
            raise ConfigError(
                f"tokens {self.tokens}: method gather needs equal shards; take a multiple of "
                f"{self.ranks}"
            )

    @property
    def family(self) -> tuple[Any, ...]:
        """What points of one model and size have in common: they may be compared."""
        return (self.model, self.tokens, self.precision, self.executor, self.overrides)

    @property
    def num_cases(self) -> int:
        """Cases of one step: DDP gives every rank a whole one."""
        return self.ranks if self.method == "ddp" else 1

    @property
    def link(self) -> str:
        """The network in words."""
        if self.network == "local" or self.ranks == 1:
            return "one host"
        rate = f", {self.rate_mbit:g} Mbit/s" if self.rate_mbit else ""
        if self.network == "emulated":
            return f"emulated, {self.latency_ms:g} ms a collective{rate}"
        return f"two hosts, +{self.latency_ms:g} ms a message{rate}"

    @property
    def name(self) -> str:
        """A name that no other point of a study has."""
        parts = [self.model, f"n{self.tokens}", f"r{self.ranks}", self.precision, self.executor]
        parts += [self.method, *self.overrides]
        if self.network != "local":
            parts.append(f"{self.network}-{self.latency_ms:g}ms-{self.rate_mbit:g}mbit")
        return "/".join(parts)

    def config(self) -> Config:
        """The configuration that the point trains. Raises ConfigError for keys that do not fit."""
        keys = [
            f"model.mixer={self.model}",
            f"data.tokens={self.tokens}",
            f"train.precision={self.precision}",
            f"engine.executor={self.executor}",
            "train.steps=1000000",
            "train.schedule=constant",
        ]
        # Replicas take whole cases, everything else shares one.
        axis = "dp" if self.method == "ddp" else "cp"
        return load_config(None, [*keys, *self.overrides, f"parallel.{axis}={self.ranks}"])

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Point:
        return cls(**{**values, "overrides": tuple(values.get("overrides", ()))})


@dataclass
class Study:
    """Measured points, by name, with all that is needed to judge them.

    `protocol` says how they were measured, `machine` on what; both belong to all points, so that a
    study is taken up again only on the same machine with the same protocol.
    """

    protocol: dict[str, Any]
    machine: dict[str, Any]
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    title: str = "Strong scaling"
    date: str = ""
    command: str = ""

    def save(self, path: Path) -> None:
        """Write the study, aside first, so that a file is whole or absent."""
        values = {"schema": SCHEMA, **dataclasses.asdict(self)}
        values["records"] = list(self.records.values())
        with written_aside(path) as aside:
            aside.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Study:
        """Raises DataError where there is no study, or a damaged one."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            schema = values.pop("schema")
            if schema != SCHEMA:
                raise DataError(f"study {path} has schema {schema}, not {SCHEMA}; measure it again")
            records = values.pop("records")
            named = {Point.from_dict(record["point"]).name: record for record in records}
            return cls(records=named, **values)
        except OSError as error:
            raise DataError(f"study {path} cannot be read ({error.strerror})") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(
                f"study {path} is damaged ({one_line(error)}); measure it again"
            ) from error

    @classmethod
    def resume(cls, path: Path, protocol: dict[str, Any], title: str, command: str) -> Study:
        """The study in a file, to be gone on with, or a new one where there is none.

        Raises:
            ConfigError: the file was measured on another machine or with another protocol.
        """
        machine = describe_machine()
        if not path.exists():
            date = datetime.now().astimezone().isoformat(timespec="minutes")
            return cls(protocol, machine, title=title, date=date, command=command)
        study = cls.load(path)
        for what, found, wanted in (
            ("protocol", study.protocol, protocol),
            ("machine", study.machine, machine),
        ):
            for key in sorted({*found, *wanted}):
                if found.get(key) != wanted.get(key):
                    raise ConfigError(
                        f"study {path} has {what} {key}={found.get(key)}, this one "
                        f"{wanted.get(key)}; give another --out or delete the file"
                    )
        return study

    @property
    def points(self) -> list[Point]:
        return [Point.from_dict(record["point"]) for record in self.records.values()]


def missing(study: Study, points: Iterable[Point]) -> list[list[Point]]:
    """The families that lack a point, whole: its points are measured in turns with one another."""
    families: dict[tuple[Any, ...], list[Point]] = {}
    for point in points:
        family = families.setdefault(point.family, [])
        if point not in family:
            family.append(point)
    return [
        family
        for family in families.values()
        if any(point.name not in study.records for point in family)
    ]
