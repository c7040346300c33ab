"""Media and starts of acoustic scattering in [−1, 1]²: halves, inclusions, a maze; smooth rings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Draws = np.random.Generator

WALL: Final = 1.0e6 + 3.0  # density of a maze's walls
PATH: Final = 3.0


class Medium(NamedTuple):
    """Density [n, n], and where a wave may start [n, n]."""

    density: Array
    is_free: Mask


def centres(cells: int) -> Array:
    """Cell centres [n] along a side of [−1, 1]²."""
    return np.asarray((np.arange(cells) + 0.5) * (2.0 / cells) - 1.0)


def discontinuous(rng: Draws, cells: int) -> Medium:
    """Two halves with densities uniform in 1 … 7, apart along a line through the inner part."""
    low, high = rng.uniform(1.0, 7.0, 2)
    angle, offset = rng.uniform(0.0, 2.0 * np.pi), rng.uniform(-0.5, 0.5)
    x, y = np.meshgrid(centres(cells), centres(cells), indexing="ij")
    side = x * np.cos(angle) + y * np.sin(angle) > offset
    return Medium(np.where(side, high, low), np.ones((cells, cells), bool))


def inclusions(rng: Draws, cells: int) -> Medium:
    """Two halves with 1 … 14 turned ellipses, whose log density is uniform in −1 … 10."""
    density = discontinuous(rng, cells).density
    x, y = np.meshgrid(centres(cells), centres(cells), indexing="ij")
    for _ in range(int(rng.integers(1, 15))):
        (x0, y0), angle = rng.uniform(-0.9, 0.9, 2), rng.uniform(0.0, np.pi)
        a, b = rng.uniform(0.05, 0.3, 2)
        along = (x - x0) * np.cos(angle) + (y - y0) * np.sin(angle)
        across = (y - y0) * np.cos(angle) - (x - x0) * np.sin(angle)
        density[(along / a) ** 2 + (across / b) ** 2 < 1.0] = np.exp(rng.uniform(-1.0, 10.0))
    return Medium(density, np.ones((cells, cells), bool))


def maze(rng: Draws, cells: int) -> Medium:
    """A maze of 3 … 8 rooms a side, each reached from each; a wall is a third of a room wide."""
    rooms = int(rng.integers(3, 9))
    plan = _carve(rng, rooms)  # [2 rooms + 1, 2 rooms + 1], paths are True
    # Walls take a unit, rooms two, so that a path is wider than a wall at any number of rooms.
    edges = np.cumsum(np.where(np.arange(2 * rooms + 1) % 2 == 1, 2.0, 1.0))
    place = np.searchsorted(edges, (centres(cells) + 1.0) * 0.5 * edges[-1])
    is_path = plan[place[:, None], place]
    return Medium(np.where(is_path, PATH, WALL), is_path)


def _carve(rng: Draws, rooms: int) -> Mask:
    """Depth first: from the last room that has one, break into a random room not yet reached."""
    plan = np.zeros((2 * rooms + 1, 2 * rooms + 1), bool)
    here = (int(rng.integers(rooms)), int(rng.integers(rooms)))
    way = [here]
    plan[2 * here[0] + 1, 2 * here[1] + 1] = True
    while way:
        i, j = way[-1]
        beside = [(i + 1, j), (i - 1, j), (i, j + 1), (i, j - 1)]
        inside = [(k, m) for k, m in beside if 0 <= k < rooms and 0 <= m < rooms]
        closed = [(k, m) for k, m in inside if not plan[2 * k + 1, 2 * m + 1]]
        if not closed:
            way.pop()
            continue
        k, m = closed[int(rng.integers(len(closed)))]
        plan[i + k + 1, j + m + 1] = plan[2 * k + 1, 2 * m + 1] = True
        way.append((k, m))
    return plan


MEDIA: Final[dict[str, Callable[[Draws, int], Medium]]] = {
    "discontinuous": discontinuous,
    "inclusions": inclusions,
    "maze": maze,
}


def rings(rng: Draws, is_free: Mask) -> Array:
    """1 … 4 smooth rings of pressure [n, n], about points where waves may start, and only there."""
    cells = len(is_free)
    at = centres(cells)
    x, y = np.meshgrid(at, at, indexing="ij")
    out = np.zeros((cells, cells))
    places = np.argwhere(is_free)
    for _ in range(int(rng.integers(1, 5))):
        # A share of the free cells, not a cell's number: the same place on any grid, nearly.
        i, j = places[int(rng.random() * len(places))]
        radius, amplitude = rng.uniform(0.1, 0.3), rng.uniform(0.5, 2.0)
        width = 0.5 * radius
        away = (np.hypot(x - at[i], y - at[j]) - 0.5 * radius) / width
        out += amplitude * np.where(np.abs(away) < 1.0, np.cos(0.5 * np.pi * away) ** 2, 0.0)
    return np.where(is_free, out, 0.0)
