"""Protocols of benchmarks: which files, how they are cut, scored and trained, what was published.

A protocol is a file of `configs/protocols`; nothing about a set stands in Python but its reader.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import OmegaConf
from pydantic import BeforeValidator, ConfigDict, Field, Strict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from cpflare.errors import ConfigError
from cpflare.files import one_line

_CHECKED = ConfigDict(extra="forbid", allow_inf_nan=False)
_Number = Annotated[float, Strict()]
_Positive = Annotated[float, Strict(), Field(gt=0)]
_Count = Annotated[int, Strict(), Field(gt=0)]
_Names = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda v: [v] if isinstance(v, str) else v),
    Field(min_length=1),
]
_Length = Annotated[int, Strict(), Field(gt=0)] | None
_Edge = Annotated[int, Strict()] | None

Axis = Literal["case", "time", "x", "y", "z", "node", "channel"]
ROW_AXES = ("x", "y", "z", "node")
Normaliser = Literal["none", "standard"]


@dataclass(frozen=True, config=_CHECKED)
class Source:
    """Where a field's numbers are: arrays of one shape, whose channels are put beside each other.

    `files` are patterns below the set's folder, one an array, each of exactly one file; `key` is
    the array's name in it. `shape` is as stored (null: any length), with the meaning `axes`.
    `channels` are those to take, `frames` the first and the last but one. A row axis that is absent
    is filled by repeating.
    """

    files: _Names
    axes: tuple[Axis, ...]
    shape: tuple[_Length, ...]
    key: str = "array"
    channels: tuple[Annotated[int, Strict(), Field(ge=0)], ...] | None = None
    frames: tuple[_Edge, _Edge] = (None, None)


@dataclass(frozen=True, config=_CHECKED)
class FieldOf:
    """A field: `role`, unit, normaliser, and its source; `test` where the test's is another one."""

    role: Literal["position", "input", "condition", "state", "target"]
    source: Source
    test: Source | None = None
    unit: str = "1"
    normalise: Normaliser = "none"


@dataclass(frozen=True, config=_CHECKED)
class Rows:
    """What a row is. Row axes are taken with `stride`, the first and the last point among them.

    `positions`: of a grid in the unit box: `nodes` (both ends), `periodic` (i/n), `cells`
    ((i + ½)/n); `field` where one of the fields is the position.
    """

    domain: Literal["grid", "points"]
    axes: tuple[Literal["x", "y", "z", "node"], ...]
    positions: Literal["nodes", "periodic", "cells", "field"]
    stride: _Count = 1


@dataclass(frozen=True, config=_CHECKED)
class Cuts:
    """Cases [start, stop) of training and test in their files; as Python's slices count."""

    train: tuple[_Edge, _Edge]
    test: tuple[_Edge, _Edge]


@dataclass(frozen=True, config=_CHECKED)
class Task:
    """Steady: inputs to targets. Rollout: `history` frames to the next, `horizon` times over.

    `time_input`: the time is an input, and each of the `horizon` frames is asked for by itself.
    """

    kind: Literal["steady", "rollout", "time_input"] = "steady"
    history: Annotated[int, Strict(), Field(ge=0)] = 0
    horizon: _Count = 1
    feedback: Literal["truth", "prediction"] = "truth"


@dataclass(frozen=True, config=_CHECKED)
class LossOf:
    """Training's loss of a case; the gradient term's weight (`ring`: outermost rows are 0)."""

    kind: Literal["rel_l2", "l1", "vrmse", "mse"] = "rel_l2"
    space: Literal["physical", "standardised"] = "physical"
    fields: Literal["joint", "each"] = "joint"
    gradient: Annotated[float, Strict(), Field(ge=0)] = 0.0
    ring: bool = False


@dataclass(frozen=True, config=_CHECKED)
class Recipe:
    """How a published model was trained; null where its source does not say.

    `reduction`: whether the gradient is of the sum or of the mean over a batch; it ties learning
    rate and clip to the batch. `normalise` is by field, where it is not the protocol's own.
    """

    source: str
    epochs: _Count
    batch: _Count
    lr: _Positive = 1e-3
    weight_decay: Annotated[float, Strict(), Field(ge=0)] | None = None
    schedule: Literal["onecycle", "cosine"] | None = None
    pct_start: _Positive | None = None
    div_factor: _Positive | None = None
    final_div_factor: _Positive | None = None
    clip: _Positive | None = None
    reduction: Literal["sum", "mean"] | None = None
    channels: _Count | None = None
    heads: _Count | None = None
    blocks: _Count | None = None
    latents: _Count | None = None
    ffn_ratio: _Positive | None = None
    normalise: dict[str, Normaliser] = Field(default_factory=dict)


@dataclass(frozen=True, config=_CHECKED)
class Published:
    """An error that was published: `value` in per cent (vrmse: as it is), null where it is not."""

    model: str
    source: str
    value: _Positive | None = None
    remark: str = ""


@dataclass(frozen=True, config=_CHECKED)
class Pin:
    """A file's size and checksum, so that two runs are known to be of the same data."""

    bytes: _Count
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True, config=_CHECKED)
class Protocol:
    """All that makes figures of a benchmark comparable; `metric` is what is reported.

    `eps` is added to deviations of normalisers. `layout` is `arrays`, or `well` for The Well's
    files, whose trajectories are all taken and whose `key` is the field's name. `pins` are of files
    by their place below the set's folder, where they are known.
    """

    name: str
    title: str
    origin: str
    rows: Rows
    fields: dict[str, FieldOf]
    metric: str
    layout: Literal["arrays", "well"] = "arrays"
    cuts: Cuts | None = None
    task: Task = Field(default_factory=Task)
    loss: LossOf = Field(default_factory=LossOf)
    eps: Annotated[float, Strict(), Field(ge=0)] = 1e-8
    recipes: dict[str, Recipe] = Field(default_factory=dict)
    published: tuple[Published, ...] = ()
    remarks: tuple[str, ...] = ()
    pins: dict[str, Pin] = Field(default_factory=dict)

    def normalisers(self, recipe: str | None = None) -> dict[str, Normaliser]:
        """The normaliser of each field, as a recipe has them."""
        own = {name: field.normalise for name, field in self.fields.items()}
        return {**own, **(self.recipes[recipe].normalise if recipe else {})}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Protocol:
        """A checked protocol from plain values.

        Raises: ConfigError that names protocol, key and value.
        """
        values = {"name": "protocol", **data}
        try:
            found = _PROTOCOL.validate_python(values)
        except ValidationError as error:
            raise _refusal(values, error) from None
        _check(found)
        return found


_PROTOCOL = TypeAdapter(Protocol)


def _check(found: Protocol) -> None:
    """Refuse what single keys cannot tell."""

    def require(holds: bool, key: str, value: Any, need: str) -> None:
        if not holds:
            raise ConfigError(f"protocol {found.name}: {key}={value}; it must be {need}")

    rows = found.rows.axes
    is_grid = found.rows.domain == "grid"
    require(len(set(rows)) == len(rows) > 0, "rows.axes", list(rows), "given, each axis once")
    require(not is_grid or "node" not in rows, "rows.axes", list(rows), "x, y or z of a grid")
    has_field = any(f.role == "position" for f in found.fields.values())
    places = found.rows.positions
    need = "field where a field has the role position, and otherwise nodes, periodic or cells"
    require((places == "field") == has_field, "rows.positions", places, need)
    targets = [name for name, f in found.fields.items() if f.role in ("target", "state")]
    require(bool(targets), "fields", list(found.fields), "given a target or a state")
    need = "given where the layout is arrays, and absent for well"
    require((found.cuts is not None) == (found.layout == "arrays"), "cuts", found.cuts, need)
    for name, field in found.fields.items():
        for part, source in (("source", field.source), ("test", field.test)):
            if source is None:
                continue
            key = f"fields.{name}.{part}"
            axes = list(source.axes)
            require(len(set(axes)) == len(axes), f"{key}.axes", axes, "each axis once")
            foreign = [a for a in axes if a in ROW_AXES and a not in rows]
            require(not foreign, f"{key}.axes", axes, f"of the rows' axes {', '.join(rows)}")
            fits = len(axes) == len(source.shape)
            require(fits, f"{key}.shape", list(source.shape), "a length an axis")
            by_case = "case" in axes or field.role == "position"
            require(by_case, f"{key}.axes", axes, "with case among them")
            need = "absent where no axis is channel"
            has_channels = source.channels is None or "channel" in axes
            require(has_channels, f"{key}.channels", source.channels, need)
    for name, recipe in found.recipes.items():
        unknown = [k for k in recipe.normalise if k not in found.fields]
        require(not unknown, f"recipes.{name}.normalise", unknown, "of the protocol's fields")


def _refusal(data: Mapping[str, Any], error: ValidationError) -> ConfigError:
    """One line for the first error; an unknown key comes before what it leaves out."""
    errors = error.errors(include_url=False)
    unknown = [e for e in errors if e["type"] == "unexpected_keyword_argument"]
    first = (unknown or errors)[0]
    # Types that pydantic tried are parts of the place too: keep what leads through the data.
    path: list[str] = []
    value: Any = data
    for part in first["loc"]:
        inside = value if isinstance(value, Mapping) else dict(enumerate(value or ()))
        if part not in inside:
            break
        path.append(str(part))
        value = inside[part]
    key = ".".join(path)
    label = f"protocol {data['name']}: "
    if unknown:
        known = {k for kind in _KINDS for k in kind.__pydantic_fields__}
        near = difflib.get_close_matches(path[-1], sorted(known), 1, 0)[0]
        return ConfigError(f"{label}unknown key {key}; did you mean {near}?")
    if first["type"] == "missing":
        missing = ".".join([*path, str(first["loc"][-1])])
        return ConfigError(f"{label}{missing} is missing; give it")
    return ConfigError(f"{label}{key}={one_line(value, 80)}; {one_line(first['msg'], 160)}")


_KINDS: tuple[Any, ...] = (
    Protocol, FieldOf, Source, Rows, Cuts, Task, LossOf, Recipe, Published, Pin,
)  # fmt: skip


def load_protocol(name_or_path: str | Path) -> Protocol:
    """A benchmark's protocol by name (`darcy`), or any by the path of its YAML file.

    Raises: ConfigError where there is no such protocol, or one with a wrong key or value.
    """
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        known = known_protocols()
        if str(name_or_path) not in known:
            near = difflib.get_close_matches(str(name_or_path), known, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(
                f"protocol={name_or_path} is unknown; {hint}known are {', '.join(known)}"
            )
        path = known[str(name_or_path)]
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except FileNotFoundError:
        raise ConfigError(f"protocol {path} does not exist; give an existing YAML file") from None
    except Exception as error:  # the YAML parser's own errors share no base with omegaconf's
        raise ConfigError(f"protocol {path} cannot be read: {one_line(error)}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"protocol {path} holds a {type(loaded).__name__}, not keys and values")
    return Protocol.from_dict({"name": path.stem, **{str(k): v for k, v in loaded.items()}})


def known_protocols() -> dict[str, Path]:
    """Names and files of the protocols that come with cpflare (in the tree, or as package data)."""
    tree = Path(__file__).parent.parent / "configs" / "protocols"
    folder = tree if tree.is_dir() else Path(str(resources.files("cpflare.configs.protocols")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
