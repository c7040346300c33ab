"""Field maps: what a data set calls its arrays, and their units, signs and reference constants."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cpflare.errors import ConfigError
from cpflare.files import one_line

CHANNELS = {"pressure": 1, "wall_shear": 3}  # canonical targets
SIGNS = (-1, 1, "unknown")
WINDINGS = ("inward", "outward", "unknown")


@dataclass(frozen=True)
class FieldSource:
    """Where one canonical field comes from: canonical = axes(source) * scale + offset.

    Either `names` (aliases: the first that the file has is taken) or `components` (three scalar
    arrays) of the mesh, or of another `file` beside it (patterns with {stem} and {parent}; a .npy
    holds the one array). `match` says how a file's rows belong to the mesh's: in the same order, or
    by the nearest point. `rows` are the [start, stop] pieces of a .npy to keep where it has more
    rows than the mesh.
    """

    names: tuple[str, ...] = ()
    components: tuple[str, ...] = ()
    scale: float = 1.0
    offset: float = 0.0
    file: tuple[str, ...] = ()
    match: str = "order"
    rows: tuple[tuple[int, int | None], ...] = ()


@dataclass(frozen=True)
class Reference:
    """Constants that turn forces into coefficients; None where the data set does not fix one."""

    speed: float | None = None  # m/s
    rho: float | None = None  # kg/m³, 1 for kinematic pressures
    area: float | None = None  # m²
    length: float | None = None  # m
    centre: tuple[float, float, float] | None = None  # m


@dataclass(frozen=True)
class FieldMap:
    """How a data set stores its surfaces.

    `association` says whether fields are cell or point data; `store_as: cell` averages point data
    to cells. `files` are the patterns by which a case's file is found in a folder. `case_name` is
    `stem` or `parent` (a parent called run_N always gives the name). `axes` gives each canonical
    component as a signed source component. `length_scale` turns coordinates into metres.
    `parameters` are patterns of a table beside the file with one row of the case's parameters.
    """

    name: str
    association: str
    fields: dict[str, FieldSource]
    shear_sign: int | str = "unknown"
    winding: str = "unknown"
    axes: tuple[str, str, str] = ("x", "y", "z")
    reference: Reference = field(default_factory=Reference)
    store_as: str | None = None
    length_scale: float = 1.0
    units: dict[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ("*.vtp", "*.vtu", "*.vtk")
    case_name: str = "stem"
    parameters: tuple[str, ...] = ()

    @property
    def stored_association(self) -> str:
        """What a row of the store is: a cell or a point."""
        return self.store_as or self.association

    @property
    def rotation(self) -> NDArray[np.float64]:
        """Matrix [3, 3] from source to canonical axes: entries 0, 1 and −1, determinant 1."""
        matrix = np.zeros((3, 3))
        for row, axis in enumerate(self.axes):
            matrix[row, "xyz".index(axis[-1])] = -1.0 if axis.startswith("-") else 1.0
        return matrix

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON and YAML."""

        def plain(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {k: plain(v) for k, v in value.items()}
            return [plain(v) for v in value] if isinstance(value, list | tuple) else value

        out: dict[str, Any] = plain(asdict(self))
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> FieldMap:
        """The inverse of `to_dict`; unknown keys and values are refused.

        Raises: ConfigError that names the map, the key, its value and the choices.
        """
        return _parse(dict(data))


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


def _parse(data: dict[str, Any]) -> FieldMap:
    name = str(data.get("name", "map"))

    def refuse(key: str, value: Any, need: str) -> ConfigError:
        return ConfigError(f"field map {name}: {key}={value}; it must be {need}")

    def known(what: str, given: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
        for key in given:
            if key not in allowed:
                near = difflib.get_close_matches(str(key), allowed, 1, 0)[0]
                raise ConfigError(
                    f"field map {name}: unknown key {what}{key}; did you mean {what}{near}?"
                )

    def number(key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise refuse(key, value, "a number")
        return float(value)

    def names(key: str, value: Any) -> tuple[str, ...]:
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, list | tuple) or not all(isinstance(v, str) for v in listed):
            raise refuse(key, value, "a name or a list of names")
        return tuple(listed)

    known("", data, tuple(FieldMap.__dataclass_fields__))
    association = data.get("association")
    if association not in ("cell", "point"):
        raise refuse("association", association, "cell or point")
    store_as = data.get("store_as")
    if store_as not in (None, association, "cell"):
        raise refuse("store_as", store_as, f"{association} or cell (cell data stays on cells)")
    axes = names("axes", data.get("axes", ["x", "y", "z"]))
    if sorted(a.lstrip("+-") for a in axes) != ["x", "y", "z"]:
        raise refuse("axes", list(axes), "x, y and z once each, with signs, such as [x, -z, y]")
    if (winding := data.get("winding", "unknown")) not in WINDINGS:
        raise refuse("winding", winding, "inward, outward or unknown")
    if (shear_sign := data.get("shear_sign", "unknown")) not in SIGNS or shear_sign is True:
        raise refuse("shear_sign", shear_sign, "-1 (minus the traction), 1 or unknown")
    if (case_name := data.get("case_name", "stem")) not in ("stem", "parent"):
        raise refuse("case_name", case_name, "stem or parent")
    length_scale = number("length_scale", data.get("length_scale", 1.0))
    if length_scale <= 0:
        raise refuse("length_scale", length_scale, "positive")

    sources: dict[str, FieldSource] = {}
    for target, entry in (data.get("fields") or {}).items():
        key = f"fields.{target}"
        if target not in CHANNELS:
            raise refuse("fields", target, f"one of {', '.join(CHANNELS)}")
        if not isinstance(entry, Mapping):
            raise refuse(key, entry, "a mapping with names or components")
        known(f"{key}.", entry, tuple(FieldSource.__dataclass_fields__))
        parts = names(f"{key}.components", entry.get("components") or [])
        aliases = names(f"{key}.names", entry.get("names") or [])
        if parts and len(parts) != CHANNELS[target]:
            raise refuse(f"{key}.components", list(parts), f"{CHANNELS[target]} names")
        files = names(f"{key}.file", entry.get("file") or [])
        if not parts and not aliases and not any(f.endswith(".npy") for f in files):
            raise refuse(key, dict(entry), "given `names`, `components` or a .npy `file`")
        if (match := entry.get("match", "order")) not in ("order", "nearest"):
            raise refuse(f"{key}.match", match, "order or nearest")
        scale = number(f"{key}.scale", entry.get("scale", 1.0))
        if scale == 0:
            raise refuse(f"{key}.scale", scale, "different from 0")
        offset = number(f"{key}.offset", entry.get("offset", 0.0))
        rows = tuple((int(a), None if b is None else int(b)) for a, b in entry.get("rows") or [])
        sources[target] = FieldSource(aliases, parts, scale, offset, files, match, rows)
    if not sources:
        raise refuse("fields", data.get("fields"), "given pressure, wall_shear or both")

    given = data.get("reference") or {}
    if not isinstance(given, Mapping):
        raise refuse("reference", given, "keys and values")
    known("reference.", given, tuple(Reference.__dataclass_fields__))
    constants: dict[str, Any] = {}
    for constant, value in given.items():
        key = f"reference.{constant}"
        if value is None:
            continue
        if constant == "centre":
            if not isinstance(value, list | tuple) or len(value) != 3:
                raise refuse(key, value, "three numbers")
            constants[constant] = tuple(number(key, v) for v in value)
        elif (positive := number(key, value)) <= 0:
            raise refuse(key, value, "positive, or null where it is unknown")
        else:
            constants[constant] = positive
    result = FieldMap(
        name=name,
        association=association,
        fields=sources,
        shear_sign=shear_sign,
        winding=winding,
        axes=(axes[0], axes[1], axes[2]),
        reference=Reference(**constants),
        store_as=None if store_as == association else store_as,
        length_scale=length_scale,
        units={str(k): str(v) for k, v in (data.get("units") or {}).items()},
        files=names("files", data.get("files", ["*.vtp", "*.vtu", "*.vtk"])),
        case_name=case_name,
        parameters=names("parameters", data.get("parameters") or []),
    )
    if np.linalg.det(result.rotation) < 0:
        raise refuse("axes", list(axes), "a rotation; this is a mirror image, flip one sign")
    return result
