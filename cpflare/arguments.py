"""Command lines of the launchers, and the page on the keys: python -m cpflare.arguments."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, NoReturn, get_type_hints

from cpflare.config import Config, ModelConfig, mixer_names, option_owners
from cpflare.errors import ConfigError
from cpflare.schema import in_words, keys_of


class Parser(argparse.ArgumentParser):
    """argparse, but a wrong command line is a `ConfigError` and not a page of usage."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **settings)
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see --help")


def described_keys() -> Iterator[tuple[str, str, str, str]]:
    """Each key of the configuration, its default, the values that it takes, and what it is."""
    last = [item.name for item in fields(ModelConfig)][-1]
    for key, (hint, default) in keys_of(Config).items():
        values = " | ".join(mixer_names()) if key == "model.mixer" else in_words(hint)
        yield key, _shown(default), values, hint.__metadata__[-1]
        if key == f"model.{last}":
            yield from _described_options()


def _described_options() -> Iterator[tuple[str, str, str, str]]:
    """The same of the mixers' own options."""
    for name, kinds in option_owners().items():
        owners = list(kinds)
        defaults = {owner: _shown(getattr(kind(), name)) for owner, kind in kinds.items()}
        first = defaults[owners[0]]
        others = [f"{o}: {shown}" for o, shown in defaults.items() if shown != first]
        hint = get_type_hints(kinds[owners[0]], include_extras=True)[name]
        about = f"{', '.join(owners)}: {hint.__metadata__[-1]}"
        about += f" ({'; '.join(others)})" if others else ""
        yield f"model.{name}", first, in_words(hint), about


def _shown(default: Any) -> str:
    shown = f"[{','.join(map(str, default))}]" if isinstance(default, list) else str(default)
    return {"None": "null", "True": "true", "False": "false"}.get(shown, shown)


def describe_keys() -> str:
    """The configuration's keys, for --help."""
    lines = [
        f"  {f'{key}={default}':<42}{values}\n      {about}"
        for key, default, values, about in described_keys()
    ]
    return "\n".join(["configuration keys and defaults:", *lines])


def keys_page() -> str:
    """The same in Markdown."""
    rows = [
        f"| `{key}` | `{default}` | {values.replace('|', 'or')} | {about} |"
        for key, default, values, about in described_keys()
    ]
    return "\n".join([_PAGE, *rows])


_PAGE = """\
# Configuration keys

In a YAML file (`model: {latents: 128}`) or on the command line (`model.latents=128`).
`python -m cpflare.arguments > docs/config.md` writes this page.

| key | default | values | what it is |
|---|---|---|---|"""

if __name__ == "__main__":
    print(keys_page())
