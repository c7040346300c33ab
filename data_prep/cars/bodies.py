"""Parametric car bodies: the shape parameters, and the smooth map from a box's surface to a car's.

The surface is the image of a rounded box under a map of the *volume*: x runs from nose to tail, z
between the under-floor and the upper profile, y out to the planform. As the map keeps the order of
the points along each of these lines, the surface cannot cut itself. Axes as DrivAerML has them: x
downstream, y lateral, z up, the origin on the front axle, lengths in metres.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

GROUND: Final = -0.3176
WHEEL_RADIUS: Final = 0.3176
TYRE_WIDTH: Final = 0.24
STYLES: Final = ("notchback", "fastback", "estate")

# The box's rounding: exponents of the superellipses in which nose, tail and sections end.
_NOSE_POWER: Final = 5.0
_TAIL_POWER: Final = 12.0
_UPPER_POWER: Final = 5.0
_LOWER_POWER: Final = 12.0
# How far the tyres would reach below the ground, m: the contact patches are flattened.
_SQUASH: Final = 0.030


class Span(NamedTuple):
    """Lower and upper end of a parameter's range."""

    low: float
    high: float

    def at(self, fraction: float) -> float:
        """The value at `fraction` (0 to 1) of the way from low to high."""
        return self.low + (self.high - self.low) * fraction


@dataclass(frozen=True)
class Shape:
    """Shape of one car; lengths in metres, angles in degrees, heights above the ground.

    The fields are DrivAerML's sixteen morphing parameters, here as absolute values, and the body
    style (an index of STYLES).
    """

    vehicle_length: float
    vehicle_width: float
    vehicle_height: float
    front_overhang: float
    front_planview: float
    hood_angle: float
    approach_angle: float
    windscreen_angle: float
    greenhouse_tapering: float
    backlight_angle: float
    decklid_height: float
    rearend_tapering: float
    rear_overhang: float
    rear_diffusor_angle: float
    vehicle_ride_height: float
    vehicle_pitch: float
    body_style: int

    @property
    def wheelbase(self) -> float:
        """Distance of the axles, m."""
        return self.vehicle_length - self.front_overhang - self.rear_overhang


RANGES: Final[dict[str, Span]] = {
    "vehicle_length": Span(4.1, 5.1),
    "vehicle_width": Span(1.80, 2.12),
    "vehicle_height": Span(1.40, 1.60),
    "front_overhang": Span(0.72, 1.00),
    "front_planview": Span(0.05, 0.45),
    "hood_angle": Span(3.0, 13.0),
    "approach_angle": Span(4.0, 20.0),
    "windscreen_angle": Span(25.0, 55.0),
    "greenhouse_tapering": Span(6.0, 26.0),
    "decklid_height": Span(0.97, 1.14),
    "rearend_tapering": Span(0.0, 8.0),
    "rear_overhang": Span(0.75, 1.10),
    "rear_diffusor_angle": Span(0.0, 17.0),
    "vehicle_ride_height": Span(0.15, 0.28),
    "vehicle_pitch": Span(-2.7, 2.7),
}
BACKLIGHT_RANGES: Final = (Span(24.0, 44.0), Span(11.0, 21.0), Span(55.0, 78.0))
_DECK_LENGTHS: Final = (0.42, 0.10, 0.03)


def draw_shape(seed: int, case: int) -> Shape:
    """The shape of case number `case` (from 1): a function of (seed, case) alone."""
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, case, 0))))
    fractions = rng.random(len(fields(Shape)))
    style = min(int(fractions[-1] * len(STYLES)), len(STYLES) - 1)
    values: dict[str, float] = {}
    for field, fraction in zip(fields(Shape)[:-1], fractions, strict=False):
        span = BACKLIGHT_RANGES[style] if field.name == "backlight_angle" else RANGES[field.name]
        values[field.name] = span.at(float(fraction))
    return Shape(**values, body_style=style)


def section_ring(cy: Array, cz: Array) -> tuple[Array, Array]:
    """Map a square's points (cy, cz) in [-1, 1] to the rounded section (Y, Z)."""
    power = np.where(cz < 0.0, _LOWER_POWER, _UPPER_POWER)
    shrink = (1.0 + np.abs(cy * cz) ** power) ** (-1.0 / power)
    return cy * shrink, cz * shrink


def round_box(cx: Array, cy: Array, cz: Array) -> tuple[Array, Array, Array]:
    """Map a cube's surface points to a box with rounded edges, all coordinates in [-1, 1]."""
    y, z = section_ring(cy, cz)
    power = np.where(cx < 0.0, _NOSE_POWER, _TAIL_POWER)
    section = np.where(cz < 0.0, _LOWER_POWER, _UPPER_POWER)
    radius = (np.abs(y) ** section + np.abs(z) ** section) ** (1.0 / section)
    shrink = (np.abs(cx) ** power + radius**power) ** (-1.0 / power)
    return cx * shrink, y * shrink, z * shrink


class Body:
    """The surface of one car as a map of the cube's surface, and the lines that describe it.

    Heights inside are above the ground; `surface` gives coordinates in DrivAerML's axes.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.x_nose = -shape.front_overhang
        self.x_tail = self.x_nose + shape.vehicle_length
        self._top = _upper_profile(shape, self.x_nose, self.x_tail)
        ride = shape.vehicle_ride_height
        self._floor = _Polyline(
            x=np.array([-WHEEL_RADIUS - 0.05, shape.wheelbase + 0.05]),
            slopes=np.array([-_tan(shape.approach_angle), 0.0, _tan(shape.rear_diffusor_angle)]),
            anchor=(0.0, ride),
            blur=np.array([0.10, 0.14]),
        )

    def surface(self, cx: Array, cy: Array, cz: Array) -> Array:
        """Points of the car [..., 3] for points of the cube's surface (one coordinate is ±1)."""
        shape = self.shape
        box_x, box_y, box_z = round_box(cx, cy, cz)
        ahead, behind = 0.5 * (1.0 - box_x), 0.5 * (1.0 + box_x)
        x = self.x_nose + shape.vehicle_length * behind
        x = x + shape.front_planview * box_y**2 * ahead**7
        # Noses lean back above the bumper, tails lean forward.
        x = x + 0.10 * np.maximum(box_z + 0.2, 0.0) ** 2 * ahead**12
        x = x - 0.10 * box_y**2 * behind**12
        half_width = self.half_width(x)
        y = box_y * half_width
        top, floor = self._tilted(x)
        floor = self._with_tyres(x, np.abs(y), half_width, floor)
        height = _ramp(floor + (top - floor) * 0.5 * (box_z + 1.0), 0.005)
        y = y * self._greenhouse(height)
        y = y + np.sign(box_y) * box_y**8 * self._wheel_discs(x, height)
        return np.stack([x, y, height + GROUND], axis=-1)

    def half_width(self, x: Array) -> Array:
        """Half of the planform's width at x, m."""
        shape = self.shape
        taper = _tan(shape.rearend_tapering) * _ramp(x - (shape.wheelbase - 0.25), 0.15)
        return 0.5 * shape.vehicle_width - taper

    def tyre_weight(self, points: Array) -> Array:
        """1 at points [n, 3] on the tyres below the body, 0 elsewhere; smooth between."""
        x, y, height = points[:, 0], np.abs(points[:, 1]), points[:, 2] - GROUND
        _, floor = self._tilted(x)
        weight = _step((y - (self.half_width(x) - TYRE_WIDTH)) / 0.03)
        weight *= _step((floor + 0.04 - height) / 0.025)
        axles = (0.0, self.shape.wheelbase)
        return weight * sum(_step((WHEEL_RADIUS - np.abs(x - axle)) / 0.02) for axle in axles)

    def _tilted(self, x: Array) -> tuple[Array, Array]:
        """Heights of the upper profile and the floor at x, pitched about the wheelbase's middle."""
        tilt = _tan(self.shape.vehicle_pitch) * (0.5 * self.shape.wheelbase - x)
        return self._top(x) + tilt, self._floor(x) + tilt

    def _greenhouse(self, height: Array) -> Array:
        """Factor on y by which the sides lean in above the belt line."""
        belt = 0.88
        lean = _tan(self.shape.greenhouse_tapering) * _ramp(height - belt, 0.06)
        return 1.0 - lean / (0.5 * self.shape.vehicle_width)

    def _with_tyres(self, x: Array, y: Array, half_width: Array, floor: Array) -> Array:
        """Heights of the floor with the tyres let down to the ground."""
        across = _step((y - (half_width - TYRE_WIDTH)) / 0.045)
        lowest = floor
        for axle in (0.0, self.shape.wheelbase):
            # Above the axle the line turns outwards, so that a tyre never fills a higher floor.
            chord = WHEEL_RADIUS**2 - (x - axle) ** 2
            tread = WHEEL_RADIUS - _SQUASH - np.sign(chord) * np.sqrt(np.abs(chord))
            lowest = lowest - across * _ramp(floor - tread, 0.05)
        return lowest

    def _wheel_discs(self, x: Array, height: Array) -> Array:
        """Outward shift of the sides that makes the wheels stand out, m."""
        shift = np.zeros_like(x)
        for axle in (0.0, self.shape.wheelbase):
            radius = np.hypot(x - axle, height - WHEEL_RADIUS)
            shift += 0.012 * _step((WHEEL_RADIUS - 0.01 - radius) / 0.015)
        return shift


class _Polyline:
    """A line of straight pieces whose kinks are rounded, as a function of x."""

    def __init__(
        self, x: Array, slopes: Array, anchor: tuple[float, float], blur: float | Array
    ) -> None:
        self._x = x
        self._slopes = slopes
        self._blur = np.broadcast_to(np.asarray(blur, dtype=np.float64), x.shape)
        self._offset = 0.0
        self._offset = anchor[1] - float(self(np.array([anchor[0]]))[0])

    def __call__(self, x: Array) -> Array:
        value = self._offset + self._slopes[0] * x
        for knot, blur, change in zip(self._x, self._blur, np.diff(self._slopes), strict=True):
            value = value + change * _ramp(x - knot, blur)
        return np.asarray(value)


def _upper_profile(shape: Shape, x_nose: float, x_tail: float) -> _Polyline:
    """Hood, windscreen, roof, backlight and decklid, as heights above the ground."""
    height = shape.vehicle_height - 0.01
    nose_height = 0.64
    # Cab-forward cars have flat screens: the roof begins at about the same place in all.
    cowl_x = 0.05 + 0.02 * (shape.windscreen_angle - 25.0)
    cowl_height = nose_height + 0.06 + _tan(shape.hood_angle) * (cowl_x - x_nose)
    screen = _tan(shape.windscreen_angle)
    roof_start = cowl_x + (height - cowl_height) / screen
    back = _tan(shape.backlight_angle)
    deck = _DECK_LENGTHS[shape.body_style]
    decklid_height = shape.decklid_height - (0.15 if shape.body_style == 2 else 0.0)
    roof_end = x_tail - deck - (height - decklid_height) / back
    roof_end = max(roof_end, roof_start + 0.45)
    deck_start = max(x_tail - deck, roof_end + 0.02)
    camber = 0.03
    middle = 0.5 * (roof_start + roof_end)
    return _Polyline(
        x=np.array([cowl_x, roof_start, middle, roof_end, deck_start]),
        slopes=np.array([_tan(shape.hood_angle), screen, camber, -camber, -back, -0.04]),
        anchor=(middle, height),
        blur=np.array([0.08, 0.12, 0.25, 0.08, 0.05]),
    )


def _tan(degrees: float) -> float:
    return float(np.tan(np.deg2rad(degrees)))


def _ramp(x: Array, blur: float) -> Array:
    """max(x, 0) with its kink rounded over a length of about 4·blur."""
    return np.asarray(blur * np.logaddexp(0.0, x / blur))


def _step(x: Array) -> Array:
    """A smooth step from 0 to 1, half-way at x = 0."""
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)))
