"""What `cpflare synth --kind` makes: a line for each generator of a data set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from data_prep.cars.synthetic import synthesise

GENERATORS: dict[str, Callable[..., list[Path]]] = {
    "cars": synthesise,
}
"""By kind: makes `cases` cases of about `cells` rows from `seed` in `out`, with `workers`
processes, and returns the cases' files."""
