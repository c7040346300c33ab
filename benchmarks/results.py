"""What a benchmark leaves: its figures as JSON and as markdown, with their machine and date."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def origin() -> dict[str, Any]:
    """The machine and the day."""
    # Not at the top: what is measured beside the package must not import it.
    from cpflare.scaling.machine import describe_machine

    return {"machine": describe_machine(), "date": datetime.date.today().isoformat()}


def write_result(
    folder: Path, name: str, record: dict[str, Any], describe: Callable[[dict[str, Any]], str]
) -> None:
    """Write FOLDER/NAME.json and NAME.md, and print the latter."""
    save_result(folder, name, record, describe)
    print(describe(record))


def save_result(
    folder: Path, name: str, record: dict[str, Any], describe: Callable[[dict[str, Any]], str]
) -> None:
    """The same without a word: after each point of a long measurement, which may be cut off."""
    folder.mkdir(parents=True, exist_ok=True)
    for suffix, text in (("json", json.dumps(record, indent=2) + "\n"), ("md", describe(record))):
        aside = folder / f"{name}.{suffix}.part"
        aside.write_text(text)
        aside.rename(folder / f"{name}.{suffix}")
