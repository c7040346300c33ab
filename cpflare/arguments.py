"""Command lines of the launchers, and the page on the keys: python -m cpflare.arguments."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, NoReturn

from cpflare.config import Config, mixer_names
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
    for key, (hint, default) in keys_of(Config).items():
        shown = f"[{','.join(default)}]" if isinstance(default, list) else str(default)
        shown = {"None": "null", "True": "true", "False": "false"}.get(shown, shown)
        values = " | ".join(mixer_names()) if key == "model.mixer" else in_words(hint)
        yield key, shown, values, hint.__metadata__[-1]


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
