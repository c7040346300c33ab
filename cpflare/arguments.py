"""Command lines of the launchers: errors are one line, like every other error of a user."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from typing import Any, Literal, NoReturn

from cpflare.config import Config
from cpflare.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """argparse, but a wrong command line is a `ConfigError` and not a page of usage."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **settings)
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see --help")


def describe_keys() -> str:
    """The configuration's keys with their defaults and choices, for --help."""
    lines = []
    for section, kind in typing.get_type_hints(Config).items():
        defaults = kind()
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            value = getattr(defaults, field.name)
            choices = [
                str(choice)
                for option in (hints[field.name], *typing.get_args(hints[field.name]))
                if typing.get_origin(option) is Literal
                for choice in typing.get_args(option)
            ]
            shown = "[" + ",".join(value) + "]" if isinstance(value, list) else value
            shown = (
                "null" if shown is None else str(shown).lower() if shown in (True, False) else shown
            )
            key = f"{section}.{field.name}={shown}"
            lines.append(f"  {key:<42}{' | '.join(choices)}".rstrip())
    return "configuration keys and defaults:\n" + "\n".join(lines)
