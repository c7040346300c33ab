"""Horseshoe vortices: the circulation about a body that sheds its flow at a rear edge."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Radius within which a vortex line's velocity is rounded off, m.
_CORE: Final = 0.10


def horseshoe_velocity(points: Array, corner: Array, half_span: float) -> Array:
    """Velocity [n, 3] at points [n, 3] of a horseshoe vortex of unit circulation (lift upwards).

    The bound line runs across at `corner` [3] from y = −half_span to +half_span; the legs run from
    its ends downstream for ever. Biot & Savart's law, with a round core.
    """
    left = points - (corner - np.array([0.0, half_span, 0.0]))
    right = points - (corner + np.array([0.0, half_span, 0.0]))
    return _leg(right) - _leg(left) + _segment(left, right)


def _leg(arm: Array) -> Array:
    """Half-infinite line along +x from the origin of `arm` [n, 3]."""
    length = np.sqrt(np.einsum("nc,nc->n", arm, arm) + _CORE**2)
    weight = 1.0 / (4.0 * np.pi * length * (length - arm[:, 0]))
    return np.stack([np.zeros(len(arm)), -arm[:, 2] * weight, arm[:, 1] * weight], axis=1)


def _segment(start: Array, end: Array) -> Array:
    """Line between two points that lie at −start and −end as seen from the fields' points."""
    cross = np.cross(start, end)
    first, second = np.linalg.norm(start, axis=1), np.linalg.norm(end, axis=1)
    line = start - end
    along = np.einsum("nc,nc->n", line, start / first[:, None] - end / second[:, None])
    square = np.einsum("nc,nc->n", cross, cross) + (_CORE * np.linalg.norm(line, axis=1)) ** 2
    return np.asarray(cross * (along / square / (4.0 * np.pi))[:, None])
