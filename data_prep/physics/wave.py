"""Linear acoustics on a staggered grid: pressure at cell centres, velocities on faces, leapfrog.

∂p/∂t = −K ∇·u, ρ ∂u/∂t = −∇p. A side of the box is a wall (no flow through it), open (waves leave:
p = ρ c u·n half a cell outside the edge cells), or joined to the opposite one (periodic).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Side = Literal["wall", "open", "periodic"]

BULK_MODULUS: Final = 4.0
COURANT: Final = 0.9  # of the largest stable step


@dataclass(frozen=True)
class Frame:
    """Pressure [n, n] and velocity [n, n, 2] at the cells' centres at one time."""

    pressure: Array
    velocity: Array


class Wave:
    """A medium of density ρ [n, n] in a square of `width` whose sides across x and y are given.

    The discrete energy of a box without open sides, `energy`, is kept to rounding.
    """

    def __init__(self, density: Array, width: float, sides: tuple[Side, Side]) -> None:
        self.h = width / len(density)
        self.sides = sides
        self.density = density
        self.speed = np.sqrt(BULK_MODULUS / density)
        self.face_density = [_face_mean(density, axis, sides[axis]) for axis in (0, 1)]

    def substeps(self, time: float) -> int:
        """The least whole number of stable steps in `time`."""
        return max(1, int(np.ceil(time * self.speed.max() * np.sqrt(2.0) / (COURANT * self.h))))

    def run(self, pressure: Array, frames: int, spacing: float) -> Iterator[Frame]:
        """`frames` frames, `spacing` apart, from `pressure` at rest; u is of that time."""
        steps = self.substeps(spacing)
        dt = spacing / steps
        p, u = pressure.copy(), self.rest()
        yield self._frame(p, u)
        for _ in range(frames - 1):
            self.advance(p, u, dt, steps)
            yield self._frame(p.copy(), u)

    def rest(self) -> list[Array]:
        """Velocities on the faces along x and along y, all 0."""
        return [np.zeros_like(density) for density in self.face_density]

    def advance(self, p: Array, u: list[Array], dt: float, steps: int) -> None:
        """Take `steps` steps of `dt`, in place; p and u are of one time before and after.

        A step is half a kick of u, a drift of p, half a kick; the halves of two steps are one.
        """
        whole = [dt / (self.h * density) for density in self.face_density]
        half = [0.5 * kick for kick in whole]
        leak = self._leak(dt)
        self._kick(u, p, half)
        for step in range(steps):
            self._drift(p, u, dt, leak)
            self._kick(u, p, whole if step < steps - 1 else half)

    def energy(self, pressure: Array, velocity: list[Array], dt: float) -> float:
        """The energy that steps of `dt` keep, of p and velocities of its time, per unit of h²."""
        kinetic = 0.0
        for axis, face in enumerate(velocity):
            ahead, behind = face.copy(), face.copy()
            kick = 0.5 * dt / (self.h * self.face_density[axis]) * self._difference(pressure, axis)
            ahead -= kick
            behind += kick
            kinetic += float((self.face_density[axis] * ahead * behind).sum())
        return 0.5 * (float((pressure**2).sum()) / BULK_MODULUS + kinetic)

    def _kick(self, u: list[Array], p: Array, scale: list[Array]) -> None:
        for axis in (0, 1):
            u[axis] -= scale[axis] * self._difference(p, axis)

    def _difference(self, p: Array, axis: int) -> Array:
        """Of p across the faces between cells; on walls and open sides there is none."""
        if self.sides[axis] == "periodic":
            return p - np.roll(p, 1, axis)
        return np.diff(p, axis=axis)

    def _leak(self, dt: float) -> Array | None:
        """What half of a step lets out through open sides, of each cell's pressure [n, n]."""
        if "open" not in self.sides:
            return None
        leak = np.zeros_like(self.density)
        for axis in (0, 1):
            if self.sides[axis] == "open":
                impedance = np.moveaxis(self.density * self.speed, axis, 0)
                edges = np.moveaxis(leak, axis, 0)  # a view
                for edge in (0, -1):
                    edges[edge] += 0.5 * dt * BULK_MODULUS / (self.h * impedance[edge])
        return leak

    def _drift(self, p: Array, u: list[Array], dt: float, leak: Array | None) -> None:
        """p after `dt`; the flow through an open side, p/(ρc), is taken at the step's middle."""
        rate = dt * BULK_MODULUS / self.h
        if leak is not None:
            p *= 1.0 - leak
        for axis in (0, 1):
            along = np.moveaxis(p, axis, 0)  # views
            flow = rate * np.moveaxis(u[axis], axis, 0)
            if self.sides[axis] == "periodic":
                along -= np.roll(flow, -1, 0) - flow
            else:
                along[:-1] -= flow
                along[1:] += flow
        if leak is not None:
            p /= 1.0 + leak

    def _frame(self, p: Array, u: list[Array]) -> Frame:
        return Frame(p, np.stack([_centre(u[a], a, self.sides[a]) for a in (0, 1)], axis=-1))


def _face_mean(values: Array, axis: int, side: Side) -> Array:
    if side == "periodic":
        return np.asarray(0.5 * (values + np.roll(values, 1, axis)))
    along = np.moveaxis(values, axis, 0)
    return np.moveaxis(0.5 * (along[1:] + along[:-1]), 0, axis)


def _centre(face: Array, axis: int, side: Side) -> Array:
    """Means over two faces; the outer one has no flow at a wall, the inner one's at open sides."""
    if side == "periodic":
        return np.asarray(0.5 * (face + np.roll(face, -1, axis)))
    along = np.moveaxis(face, axis, 0)
    outer = np.zeros_like(along[:1])
    first, last = (outer, outer) if side == "wall" else (along[:1], along[-1:])
    whole = np.concatenate([first, along, last])
    return np.moveaxis(0.5 * (whole[1:] + whole[:-1]), 0, axis)
