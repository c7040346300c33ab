"""Bodies whose forces are known: a closed cube of squares, and published Ahmed bodies."""

from __future__ import annotations

import numpy as np

AHMED_CD = {1: 0.256, 2: 0.349, 3: 0.278, 4: 0.416, 5: 0.256}


def cube(side=2.0, centre=(0.0, 0.0, 0.0), per_edge=4):
    """Closed cube of per_edge² squares a face: position, outward area vector, area."""
    step = side / per_edge
    line = (np.arange(per_edge) + 0.5) * step - side / 2
    u, v = (grid.ravel() for grid in np.meshgrid(line, line))
    positions, vectors = [], []
    for axis in range(3):
        for sign in (-1.0, 1.0):
            place = np.zeros((len(u), 3))
            place[:, axis] = sign * side / 2
            place[:, (axis + 1) % 3], place[:, (axis + 2) % 3] = u, v
            vector = np.zeros_like(place)
            vector[:, axis] = sign * step**2
            positions.append(place + centre)
            vectors.append(vector)
    area_vector = np.concatenate(vectors)
    return {
        "position": np.concatenate(positions),
        "area_vector": area_vector,
        "area": np.linalg.norm(area_vector, axis=1),
    }
