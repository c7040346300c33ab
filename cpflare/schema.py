"""Sections of checked keys, built from plain values; an error is one line with key, value, mend.

A key's annotation holds its type, its limits and a sentence that says what it is.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from annotated_types import Gt
from pydantic import AllowInfNan, BeforeValidator, ConfigDict, Strict, TypeAdapter, ValidationError

from cpflare.errors import ConfigError


def _whole(value: Any) -> Any:
    """1e5 is a float to YAML."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, Strict(), BeforeValidator(_whole)]
Count = Annotated[Whole, Gt(0)]
Number = Annotated[float, Strict()]
Finite = Annotated[Number, AllowInfNan(False)]
Positive = Annotated[Finite, Gt(0)]
Switch = Annotated[bool, Strict()]


class Section:
    """Base of the dataclasses, which refuse keys that they do not have."""

    __pydantic_config__ = ConfigDict(extra="forbid")


def build(kind: Any, values: Mapping[str, Any], sections: Mapping[str, type] | None = None) -> Any:
    """A dataclass of dataclasses from nested plain values; absent keys take their defaults.

    `sections` are subclasses of sections' classes, by name, that take their places.

    Raises:
        ConfigError: a key is unknown (the nearest known one is named), a value is of another type
            or beyond its limits.
    """
    given = {name: {} if keys is None else keys for name, keys in values.items()}
    extended = _extended(kind, tuple((sections or {}).items()))
    try:
        checked = _adapter(extended).validate_python(given)
    except ValidationError as error:
        raise ConfigError(_sentence(extended, given, error.errors())) from None
    return kind(**{item.name: getattr(checked, item.name) for item in dataclasses.fields(kind)})


@functools.cache
def _extended(kind: Any, sections: tuple[tuple[str, type], ...]) -> Any:
    """A dataclass with the classes of some of its sections replaced."""
    replaced = [(name, part, dataclasses.field(default_factory=part)) for name, part in sections]
    return dataclasses.make_dataclass(kind.__name__, replaced, bases=(kind,), frozen=True)


_adapter = functools.cache(TypeAdapter)


def keys_of(kind: Any) -> dict[str, tuple[Any, Any]]:
    """All keys, as section.name, with their annotated types and defaults."""
    return {
        f"{section}.{name}": (hint, getattr(part(), name))
        for section, part in typing.get_type_hints(kind).items()
        for name, hint in typing.get_type_hints(part, include_extras=True).items()
    }


def _sentence(kind: Any, given: Any, errors: Sequence[Any]) -> str:
    """The first key's errors (one for each type that its value might have had) as one line."""
    place, problem = errors[0]["loc"][:2], errors[0]["type"]
    key = ".".join(map(str, place))
    value = functools.reduce(lambda part, name: part[name], place, given)
    if problem in ("unexpected_keyword_argument", "invalid_key"):
        if len(place) == 1 and isinstance(value, Mapping) and value:
            key += f".{next(iter(value))}"
        known = list(keys_of(kind))
        by_name = [name for name in known if name.split(".")[1] == key.split(".")[-1]]
        near = by_name or difflib.get_close_matches(key, known, n=1, cutoff=0.7)
        mend = f"did you mean {near[0]}?" if near else "train_cp.py --help lists the keys"
        return f"unknown config key '{key}'; {mend}"
    if problem == "dataclass_type":
        return f"{key}={value!r} must be a section with keys below it"
    limits = "".join(_limits(e.get("ctx", {})) for e in errors if e["loc"][:2] == place)
    wanted = in_words(keys_of(kind)[key][0])
    listed = value if isinstance(value, list) else [value]
    mend = ""
    if ("a text" in wanted or "names" in wanted) and not all(isinstance(v, str) for v in listed):
        shown = '["1e5"]' if isinstance(value, list) else '"1e5"'
        mend = f"; quotes mend it where YAML reads a name otherwise, as in '{key}={shown}'"
    return f"{key}={value!r} must be {limits or wanted}{mend}"


def in_words(hint: Any) -> str:
    """What values an annotated type takes: "a whole number (positive) or null"."""
    kind, *marks = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(map(in_words, typing.get_args(kind)))
    if typing.get_origin(kind) is Literal:
        return " | ".join(typing.get_args(kind))
    limits = _limits(
        {name: getattr(m, name) for m in marks for name in _LIMITS if hasattr(m, name)}
    )
    return f"{_KINDS[kind]} ({limits})" if limits else _KINDS[kind]


_KINDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    list[str]: "a list of names",
    list[float]: "a list of numbers",
    type(None): "null",
}
_LIMITS = {
    "gt": "positive",  # all are above 0
    "ge": "at least {ge:g}",
    "lt": "below {lt:g}",
    "allow_inf_nan": "finite",
}


def _limits(bounds: Mapping[str, Any]) -> str:
    return " and ".join(text.format(**bounds) for name, text in _LIMITS.items() if name in bounds)
