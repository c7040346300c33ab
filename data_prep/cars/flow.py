"""Flow about a parametric car: panel solution, wake-source base region, flat-plate wall shear.

The outer flow is inviscid (source panels over a ground plane, the car's half with its image). The
base is an outflow, as in Parkinson & Jandali's wake-source model: its strength makes the pressure
on the separation line equal the base pressure, so the wake is felt on the whole surface. The base
pressure itself follows Hoerner's correlation with the forebody's friction, corrected for slant,
boat-tailing and the underbody. Velocities are in units of the stream's, pressures coefficients.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import make_interp_spline

from data_prep.cars.bodies import GROUND, Body
from data_prep.cars.body_mesh import Block, Lattice, SurfaceGrid
from data_prep.cars.panel import Mirror, Panels, solve
from data_prep.cars.vortex import horseshoe_velocity

Array = NDArray[np.float64]

COARSE: Final = Lattice(40, 16, 10)
SPEED: Final = 38.889  # m/s
VISCOSITY: Final = 1.507e-5  # m²/s
TYRE_WAKE_PRESSURE: Final = -0.35
# Total pressure that the rough underbody takes from the stream below, times the ride height, m.
UNDERBODY_LOSS: Final = 0.05


@dataclass(frozen=True)
class SurfaceFlow:
    """Flow at surface points: Cp [n], its standard deviation [n], traction [n, 3] in m²/s²."""

    pressure_coefficient: Array
    fluctuation: Array
    traction: Array


class CarFlow:
    """The flow about one body: solved on the coarse lattice, evaluated anywhere on the surface."""

    def __init__(self, body: Body) -> None:
        self.body = body
        shape = body.shape
        lattice = COARSE
        grid = SurfaceGrid(body, lattice)
        corners = grid.vertices[lattice.quads()]
        panels = Panels.from_corners(corners[_half_cells(lattice)])
        base = self.base_weight(panels.centre, panels.normal)
        facing = np.maximum(panels.normal[:, 0], 0.0)
        self.base_area = 2.0 * float((base * facing) @ panels.area)
        self.frontal_area = 2.0 * float(np.maximum(-panels.normal[:, 0], 0.0) @ panels.area)
        self.wetted_area = 2.0 * float(panels.area.sum())
        self.base_pressure = self._base_pressure()
        self.loss = UNDERBODY_LOSS / shape.vehicle_ride_height

        still = np.zeros(len(panels))
        rest = np.zeros((len(panels), 3))
        stream = np.tile([1.0, 0.0, 0.0], (len(panels), 1))
        aside = (2.0 * panels.centre[:, 1] / shape.vehicle_width) ** 2
        flows = solve(
            panels,
            np.stack([stream, self._vortices(panels.centre), rest, rest]),
            outflow=np.stack([still, still, base * facing, base * facing * aside]),
            mirrors=(Mirror(1, 0.0), Mirror(2, GROUND)),
        )
        lines = _separation_lines(lattice, base) * panels.area
        squares = 1.0 - self.base_pressure - np.array([0.0, self.loss, 0.0])
        self.strengths = _shed(flows, lines, panels.normal, squares)
        velocity = flows[0] + np.einsum("k,knc->nc", self.strengths, flows[1:])
        self._at_vertices = _to_vertices(lattice, _mirrored(lattice, velocity))

    def base_weight(self, points: Array, normals: Array) -> Array:
        """1 where the flow has left the body's rear, 0 where it is attached, smooth between."""
        x = points[:, 0]
        facing = _step((normals[:, 0] - 0.55) / 0.04)
        rear = _step((x - 0.55 * self.body.shape.wheelbase) / 0.05)
        return facing * rear * (1.0 - self.body.tyre_weight(points))

    def tyre_wake_weight(self, points: Array, normals: Array) -> Array:
        """1 on the lee sides of the tyres."""
        return self.body.tyre_weight(points) * _step((normals[:, 0] + 0.45) / 0.08)

    def _vortices(self, points: Array) -> Array:
        """Velocity [n, 3] at points of a unit circulation about the body, with the ground's image.

        Only the circulation and where the legs leave the body, in the base, matter to the flow
        outside; the bound lines are spread out inside to be far from every panel.
        """
        body, shape = self.body, self.body.shape
        stations = body.x_nose + np.array([0.4, 0.5, 0.6, 0.7]) * shape.vehicle_length
        spans = np.array([0.35, 0.55, 0.75]) * 0.5 * shape.vehicle_width
        mirrored = points * [1.0, 1.0, -1.0] + [0.0, 0.0, 2.0 * GROUND]
        velocity = np.zeros_like(points)
        for x, span in product(stations, spans):
            corner = np.array([x, 0.0, GROUND + 0.55])
            velocity += horseshoe_velocity(points, corner, span)
            velocity += horseshoe_velocity(mirrored, corner, span) * [1.0, 1.0, -1.0]
        return velocity / (len(stations) * len(spans))

    def _base_pressure(self) -> float:
        """Pressure coefficient of the base region."""
        shape = self.body.shape
        friction = 0.0030 * self.wetted_area / self.frontal_area
        hoerner = -0.029 / np.sqrt(friction)
        slant = 1.0 + 0.25 * np.exp(-(((shape.backlight_angle - 28.0) / 10.0) ** 2))
        boat_tail = 1.0 - 0.03 * shape.rearend_tapering
        under = 1.0 + 0.15 * np.tanh((shape.rear_diffusor_angle - 9.0) / 4.0)
        return float(1.66 * hoerner * slant * boat_tail * under)

    @cached_property
    def _splines(self) -> tuple[Array, Array, Array]:
        """Velocity and its square on the strip [nx+1, around, 4] and the caps [nz+1, ny+1, 4]."""
        fields = self._at_vertices
        strip = fields[COARSE.ring_ids(slice(None))][:, :-1]
        nose, tail = (fields[COARSE.cap_ids(end)] for end in (False, True))
        return strip, nose, tail

    def fields_on(self, lattice: Lattice, block: Block) -> tuple[Array, Array]:
        """Velocity and its square at a block's vertices [p, 4] and the quads' excess [q, 4].

        The excess is the value at the quad's middle less the mean of its corners' values.
        """
        strip, nose, tail = self._splines
        if block.part == "strip":
            table = strip
            rows, columns = lattice.nx, lattice.around
            down = _open_basis(COARSE.nx, np.arange(rows + 1)[block.rows] * COARSE.nx / rows)
            down_half = _open_basis(COARSE.nx, _halves(rows, block.rows) * COARSE.nx / rows)
            places = _ring_places(lattice, np.arange(columns + 1.0))
            across = _ring_basis(COARSE.around, places)
            across_half = _ring_basis(
                COARSE.around, _ring_places(lattice, _halves(columns, slice(None)))
            )
        else:
            table = tail if block.part == "tail" else nose
            rows, columns = lattice.nz, lattice.ny
            down = _open_basis(COARSE.nz, np.arange(rows + 1)[block.rows] * COARSE.nz / rows)
            down_half = _open_basis(COARSE.nz, _halves(rows, block.rows) * COARSE.nz / rows)
            across = _open_basis(COARSE.ny, np.arange(columns + 1) * COARSE.ny / columns)
            across_half = _open_basis(
                COARSE.ny, _halves(columns, slice(None)) * COARSE.ny / columns
            )
        at_vertices = np.einsum("ai,ijc,bj->abc", down, table, across, optimize=True)
        at_middles = np.einsum("ai,ijc,bj->abc", down_half, table, across_half, optimize=True)
        corners = (
            at_vertices[:-1, :-1]
            + at_vertices[1:, :-1]
            + at_vertices[1:, 1:]
            + at_vertices[:-1, 1:]
        )
        excess = at_middles - 0.25 * corners
        channels = table.shape[-1]
        return at_vertices.reshape(-1, channels), excess.reshape(-1, channels)

    def _underbody_loss(self, points: Array, normals: Array) -> Array:
        """Loss of total pressure at points [n] of the underbody, growing from nose to tail."""
        run = np.clip((points[:, 0] - self.body.x_nose) / self.body.shape.vehicle_length, 0.0, 1.0)
        return self.loss * run * _step((-normals[:, 2] - 0.35) / 0.08)

    def evaluate(self, points: Array, normals: Array, fields: Array) -> SurfaceFlow:
        """Flow at points [n, 3] with outward normals [n, 3], from `fields_on`'s values [n, 4]."""
        base = self.base_weight(points, normals)
        tyre_wake = self.tyre_wake_weight(points, normals)
        square = np.maximum(fields[:, 3], 0.0)
        cp = _level_suction(1.0 - square - self._underbody_loss(points, normals))
        cp = (1.0 - base) * cp + base * self.base_pressure
        cp = (1.0 - tyre_wake) * cp + tyre_wake * TYRE_WAKE_PRESSURE
        separated = np.maximum(base, tyre_wake)

        along = fields[:, :3] - np.einsum("nc,nc->n", fields[:, :3], normals)[:, None] * normals
        along *= SPEED * (1.0 - 0.9 * separated)[:, None]
        speed = np.linalg.norm(along, axis=1)
        run = points[:, 0] - self.body.x_nose + 0.10
        reynolds = np.maximum(speed * run / VISCOSITY, 1e4)
        friction = 0.0592 * reynolds**-0.2
        traction = 0.5 * friction[:, None] * speed[:, None] * along
        fluctuation = 0.02 + 0.05 * separated + 0.02 * np.abs(cp)
        return SurfaceFlow(cp, fluctuation, traction)


def _level_suction(cp: Array) -> Array:
    """Level off suction peaks below −1.2, where a boundary layer would leave the surface."""
    excess = np.maximum(-1.2 - cp, 0.0)
    return np.asarray(np.maximum(cp, -1.2) - 0.8 * np.tanh(excess / 0.8))


def _shed(flows: Array, lines: Array, normal: Array, squares: Array) -> Array:
    """Strengths [k] of the flows [1 + k, n, 3] after the first that give k lines the wake's speed.

    lines [k, n] weigh the panels on each separation line. Linear equations: the mean speed along
    the surface, downstream, is the root of `squares` [k].
    """
    along = np.array([1.0, 0.0, 0.0]) - normal[:, :1] * normal
    along /= np.linalg.norm(along, axis=1)[:, None] + 1e-12
    weights = lines / lines.sum(axis=1, keepdims=True)
    speeds = np.einsum("ln,knc,nc->lk", weights, flows, along, optimize=True)
    return np.asarray(np.linalg.solve(speeds[:, 1:], np.sqrt(squares) - speeds[:, 0]))


def _separation_lines(lattice: Lattice, base: Array) -> Array:
    """Weights [3, n] of the half's panels where the flow leaves the top, the bottom and the side.

    Going downstream over the strip and the tail's outer row, a panel counts by how much more of the
    next one lies in the base; so the weights change smoothly with the shape.
    """
    half_y, half_around = lattice.ny // 2, lattice.around // 2
    cap_cells = lattice.nz * half_y
    strip = lattice.nx * half_around
    numbers = np.arange(strip).reshape(lattice.nx, half_around)
    tail = strip + cap_cells + np.arange(cap_cells).reshape(lattice.nz, half_y)
    weights = np.zeros((3, len(base)))
    upper = np.concatenate([numbers[:, half_y + lattice.nz :], tail[-1:, ::-1]])
    lower = np.concatenate([numbers[:, :half_y], tail[:1]])
    side = np.concatenate([numbers[:, half_y : half_y + lattice.nz], tail[:, -1:].T])
    for weight, path in zip(weights, (upper, lower, side), strict=True):
        beyond = np.concatenate([base[path], np.ones((1, path.shape[1]))])
        weight[path] = np.maximum(np.diff(beyond, axis=0), 0.0)
    return weights


def _half_cells(lattice: Lattice) -> NDArray[np.int64]:
    """Numbers of the quads with y > 0, in the order of `Lattice.quads`."""
    strip = np.arange(lattice.nx * lattice.around).reshape(lattice.nx, lattice.around)
    cap = strip.size + np.arange(lattice.ny * lattice.nz).reshape(lattice.nz, lattice.ny)
    half = lattice.ny // 2
    parts = (
        strip[:, : lattice.around // 2],
        cap[:, half:],
        cap[:, half:] + lattice.ny * lattice.nz,
    )
    return np.concatenate([part.ravel() for part in parts])


def _mirrored(lattice: Lattice, half: Array) -> Array:
    """Vectors [n, 3] of all quads from those of the half."""
    full = np.empty((lattice.nx * lattice.around + 2 * lattice.ny * lattice.nz, 3))
    full[_half_cells(lattice)] = half
    half_y = lattice.ny // 2
    strip_cells = lattice.nx * lattice.around
    strip = full[:strip_cells].reshape(lattice.nx, lattice.around, 3)
    caps = full[strip_cells:].reshape(2, lattice.nz, lattice.ny, 3)
    sign = np.array([1.0, -1.0, 1.0])
    strip[:, lattice.around // 2 :] = sign * strip[:, : lattice.around // 2][:, ::-1]
    caps[:, :, :half_y] = sign * caps[:, :, half_y:][:, :, ::-1]
    return full


def _to_vertices(lattice: Lattice, velocity: Array) -> Array:
    """Velocity and its square [vertices, 4] from those in the quads.

    Averages to the vertices and twice gives back what averaging lost; a checkerboard, which means
    nothing in a panel solution, stays lost.
    """
    quads = lattice.quads()
    fields = np.concatenate([velocity, np.einsum("nc,nc->n", velocity, velocity)[:, None]], axis=1)
    values = _average(quads, fields)
    for _ in range(2):
        values += _average(quads, fields - values[quads].mean(axis=1))
    return values


def _average(quads: NDArray[np.int64], fields: Array) -> Array:
    """Mean at each vertex over the quads around it."""
    ids = quads.ravel()
    count = np.bincount(ids)
    repeated = np.repeat(fields, quads.shape[1], axis=0)
    sums = [np.bincount(ids, weights=channel) for channel in repeated.T]
    return np.asarray(np.stack(sums, axis=1) / count[:, None])


def _open_basis(cells: int, places: Array) -> Array:
    """Values [places, cells + 1] at real indices of the cubic splines through unit vectors."""
    return np.asarray(make_interp_spline(np.arange(cells + 1.0), np.eye(cells + 1), k=3)(places))


def _ring_basis(cells: int, places: Array) -> Array:
    """The same on a closed ring of `cells` vertices."""
    wrapped = np.concatenate([np.eye(cells), np.eye(cells)[:1]])
    spline = make_interp_spline(np.arange(cells + 1.0), wrapped, k=3, bc_type="periodic")
    return np.asarray(spline(places))


def _halves(cells: int, rows: slice) -> Array:
    return np.asarray(np.arange(cells + 1.0)[rows][:-1] + 0.5)


def _ring_places(lattice: Lattice, places: Array) -> Array:
    """Places on a ring of `lattice` as places on a ring of the coarse one."""
    ends = [np.cumsum([0, g.ny // 2, g.nz, g.ny, g.nz, g.ny // 2]) for g in (lattice, COARSE)]
    return np.asarray(np.interp(places, ends[0], ends[1]))


def _step(x: Array) -> Array:
    """A smooth step from 0 to 1, half-way at x = 0."""
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)))
