"""Field maps: what a data set calls its arrays, and their units, signs and reference constants."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BeforeValidator, ConfigDict, Field, Strict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from cpflare.errors import ConfigError, DataError
from cpflare.fields import FIELDS, TARGET_FIELDS, Axes, SourceField
from cpflare.files import one_line


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else () if value is None else value


def _no_truth(value: Any) -> Any:
    return None if isinstance(value, bool) else value  # True would pass for 1


# What a refusal says after "it must be" is a key's description.
_CHECKED = ConfigDict(extra="forbid", allow_inf_nan=False)
_Number = Annotated[float, Strict()]
_Names = Annotated[
    tuple[str, ...],
    BeforeValidator(_listed),
    Field(description="a name or a list of names"),
]
_Text = Annotated[str, Field(coerce_numbers_to_str=True)]
_Constant = Annotated[
    _Number | None, Field(gt=0, description="a positive number, or null where it is unknown")
]
_Rows = Annotated[tuple[tuple[int, int | None], ...], BeforeValidator(_listed)]
_Empty = BeforeValidator(lambda value: {} if value is None else value)


@dataclass(frozen=True, config=_CHECKED)
class FieldSource:
    """Where one canonical field comes from: canonical = axes(source) * scale + offset.

    Either `names` (aliases: the first that the file has is taken) or `components` (three scalar
    arrays) of the mesh, or of another `file` beside it (patterns with {stem} and {parent}; a .npy
    holds the one array). `match` says how a file's rows belong to the mesh's: in the same order, or
    by the nearest point. `rows` are the [start, stop] pieces of a .npy to keep where it has more
    rows than the mesh.
    """

    names: _Names = ()
    components: _Names = ()
    scale: _Number = Field(default=1.0, description="a number different from 0")
    offset: _Number = Field(default=0.0, description="a number")
    file: _Names = ()
    match: Literal["order", "nearest"] = Field(default="order", description="order or nearest")
    rows: _Rows = Field(default=(), description="a list of [start, stop]")


@dataclass(frozen=True, config=_CHECKED)
class Reference:
    """Constants that turn forces into coefficients; None where the data set does not fix one."""

    speed: _Constant = None  # m/s
    rho: _Constant = None  # kg/m³, 1 for kinematic pressures
    area: _Constant = None  # m²
    length: _Constant = None  # m
    centre: Annotated[
        tuple[_Number, _Number, _Number] | None, Field(description="three numbers")
    ] = None  # m
    # A surface is one half; the other is its image in the plane through `centre` normal to this.
    mirror: Annotated[
        Literal["x", "y", "z"] | None, Field(description="x, y or z, or null for whole surfaces")
    ] = None


@dataclass(frozen=True, config=_CHECKED)
class FieldMap:
    """How a data set stores its surfaces.

    `association` says whether fields are cell or point data; `store_as: cell` averages point data
    to cells. `files` are the patterns by which a case's file is found in a folder. `case_name` is
    `stem` or `parent` (a parent called run_N always gives the name). `axes` gives each canonical
    component as a signed source component. `length_scale` turns coordinates into metres.
    `parameters` are patterns of a table beside the file with one row of the case's parameters.
    """

    name: _Text = Field(description="a text")
    association: Literal["cell", "point"] = Field(description="cell or point")
    fields: dict[_Text, FieldSource] = Field(description="keys and values")
    shear_sign: Annotated[Literal[-1, 1, "unknown"], BeforeValidator(_no_truth)] = Field(
        default="unknown", description="-1 (minus the traction), 1 or unknown"
    )
    winding: Literal["inward", "outward", "unknown"] = Field(
        default="unknown", description="inward, outward or unknown"
    )
    axes: _Names = ("x", "y", "z")
    reference: Annotated[Reference, _Empty] = Field(
        default=Reference(), description="keys and values"
    )
    store_as: Literal["cell"] | None = Field(
        default=None, description="the association, or cell (cell data stays on cells)"
    )
    length_scale: _Number = Field(default=1.0, gt=0, description="a positive number")
    units: Annotated[dict[str, _Text], _Empty] = Field(default={}, description="texts by name")
    files: _Names = ("*.vtp", "*.vtu", "*.vtk")
    case_name: Literal["stem", "parent"] = Field(default="stem", description="stem or parent")
    parameters: _Names = ()

    @property
    def stored_association(self) -> str:
        """What a row of the store is: a cell or a point."""
        return self.store_as or self.association

    @property
    def turn(self) -> Axes:
        """From source to canonical axes."""
        return Axes.parse(self.axes)

    @property
    def rotation(self) -> NDArray[np.float64]:
        """Matrix [3, 3] from source to canonical axes: entries 0, 1 and −1, determinant 1."""
        return self.turn.matrix

    def source_field(self, name: str) -> SourceField:
        """How a field stands in the source; its names depend on the file."""
        source = self.fields[name]
        return SourceField(FIELDS[name], (), source.scale, source.offset, self.turn)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON and YAML."""
        out: dict[str, Any] = _MAP.dump_python(self, mode="json")
        if self.reference.mirror is None:  # as stores were written before there was one
            del out["reference"]["mirror"]
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> FieldMap:
        """The inverse of `to_dict`; unknown keys and values are refused.

        Raises: ConfigError that names the map, the key, its value and the choices.
        """
        values = {"name": "map", **data}
        if values.get("store_as") == values.get("association"):
            values.pop("store_as", None)
        try:
            found = _MAP.validate_python(values)
        except ValidationError as error:
            raise _refusal(values, error) from None
        _check(found)
        return found


_MAP = TypeAdapter(FieldMap)


def _check(found: FieldMap) -> None:
    """Refuse what single keys cannot tell."""

    def require(holds: bool, key: str, value: Any, need: str) -> None:
        if not holds:
            raise ConfigError(f"field map {found.name}: {key}={value}; it must be {need}")

    for target, source in found.fields.items():
        key, channels = f"fields.{target}", FIELDS[target].channels if target in FIELDS else 0
        require(target in TARGET_FIELDS, "fields", target, f"one of {', '.join(TARGET_FIELDS)}")
        parts = list(source.components)
        require(len(parts) in (0, channels), f"{key}.components", parts, f"{channels} names")
        given = parts or source.names or any(file.endswith(".npy") for file in source.file)
        stated = {"file": list(source.file)} if source.file else {}
        require(bool(given), key, stated, "given `names`, `components` or a .npy `file`")
        require(source.scale != 0, f"{key}.scale", source.scale, "different from 0")
    require(bool(found.fields), "fields", found.fields, "given pressure, wall_shear or both")
    axes = list(found.axes)
    try:
        mirrors = np.linalg.det(found.rotation) < 0
    except DataError:
        require(False, "axes", axes, "x, y and z once each, with signs, such as [x, -z, y]")
    require(not mirrors, "axes", axes, "a rotation; this is a mirror image, flip one sign")


def _refusal(data: Mapping[str, Any], error: ValidationError) -> ConfigError:
    """One line for the first error; an unknown key comes before what it leaves out."""
    errors = error.errors(include_url=False)
    unknown = [e for e in errors if e["type"] == "unexpected_keyword_argument"]
    path = [str(part) for part in (unknown or errors)[0]["loc"]]
    nested: dict[str, tuple[Any, int]] = {"fields": (FieldSource, 3), "reference": (Reference, 2)}
    kind, depth = nested.get(path[0] if len(path) > 1 else "", (FieldMap, 1))
    *above, last = path[:depth]
    known = {key: info.description for key, info in kind.__pydantic_fields__.items()}
    label = f"field map {data['name']}: "
    if unknown:
        near = ".".join([*above, *difflib.get_close_matches(last, known, 1, 0)])
        return ConfigError(f"{label}unknown key {'.'.join([*above, last])}; did you mean {near}?")
    value: Any = data
    for part in (*above, last):
        value = value.get(part) if isinstance(value, Mapping) else value
    need = known.get(last) or "a mapping with names or components"
    return ConfigError(f"{label}{'.'.join([*above, last])}={value}; it must be {need}")


def load_field_map(name_or_path: str | Path) -> FieldMap:
    """A data set's field map by name (`drivaerml`), or any map by the path of its YAML file.

    Raises: ConfigError where there is no such map, or one with a wrong key or value.
    """
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        known = known_maps()
        if str(name_or_path) not in known:
            near = difflib.get_close_matches(str(name_or_path), known, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(
                f"dataset={name_or_path} is unknown; {hint}known are {', '.join(known)}, or give "
                "--map FILE.yaml"
            )
        path = known[str(name_or_path)]
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except FileNotFoundError:
        raise ConfigError(f"field map {path} does not exist; give an existing YAML file") from None
    except (OmegaConfBaseException, OSError, ValueError) as error:
        raise ConfigError(f"field map {path} cannot be read: {one_line(error)}") from None
    except Exception as error:  # the YAML parser's own errors share no base with the above
        raise ConfigError(f"field map {path} is no YAML: {one_line(error)}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"field map {path} holds a {type(loaded).__name__}, not keys and values")
    data = {str(k): v for k, v in loaded.items()}
    return FieldMap.from_dict({"name": path.stem, **data})


def known_maps() -> dict[str, Path]:
    """Names and files of the maps that come with cpflare (in the tree, or as package data)."""
    tree = Path(__file__).parent.parent / "configs" / "datasets"
    folder = tree if tree.is_dir() else Path(str(resources.files("cpflare.configs.datasets")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
