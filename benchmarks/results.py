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
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")
    (folder / f"{name}.md").write_text(describe(record))
    print(describe(record))
