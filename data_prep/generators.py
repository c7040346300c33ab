"""What `cpflare synth --kind` makes: a line for each generator of a data set."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from data_prep.cars.synthetic import synthesise
from data_prep.physics import acoustics, darcy, elasticity, navier_stokes

GENERATORS: dict[str, Callable[..., list[Path]]] = {
    "cars": synthesise,
    "darcy": darcy.make_set,
    "elasticity": elasticity.make_set,
    "acoustics": partial(acoustics.make_set, medium="inclusions"),
    "acoustics_discontinuous": partial(acoustics.make_set, medium="discontinuous"),
    "acoustics_maze": partial(acoustics.make_set, medium="maze"),
    "navier_stokes": navier_stokes.make_set,
}
"""By kind: makes `cases` cases of about `cells` rows from `seed` in `out`, with `workers`
processes, and returns the files that it wrote."""
