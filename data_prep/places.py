"""Places of rows: whether float32 keeps them apart, and which points of two files are one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpflare.errors import DataError
from cpflare.formats.surface import Surface
from data_prep.geometry import dual_areas, measure

Array = NDArray[Any]

_LOST = 0.01  # share of places that may fall together in float32 before a case is refused
_PARTNER = 1e-5  # of the mesh's size: how far a point of another file may stand away
_ALIKE = 1e-3  # normals nearer to each other than this are one direction


def check_places(path: Path, fields: dict[str, Array], offset: Array, notices: list[str]) -> None:
    """Tell how many distinct places fall together in float32 about the box's centre.

    Raises: DataError where it is more than a hundredth: the box is too large for the cells.
    """
    relative = fields["position"] - offset
    step = float(np.spacing(np.float32(np.abs(relative).max())))
    sizes = fields["area"]
    if not ((sizes > 0) & (sizes < (8 * step) ** 2)).any():
        return
    exact, rounded = _count(relative), _count(relative.astype(np.float32))
    if exact - rounded > _LOST * exact:
        row = int(np.argmax(np.abs(relative).max(axis=1)))
        raise DataError(
            f"{path}: only {rounded} of {exact} places stay apart in a box of "
            f"{np.ptp(relative, axis=0).max():.3g} m; leave out what lies far away, such as row "
            f"{row} at {fields['position'][row]}"
        )
    if exact > rounded:
        notices.append(f"{exact - rounded} of {exact} places fall together in float32")


def _count(places: Array) -> int:
    rows = np.ascontiguousarray(places + 0.0)  # −0 becomes 0
    return len(np.unique(rows.view(np.dtype((np.void, rows.itemsize * 3)))))


def match_points(
    path: Path,
    other_path: Path,
    mesh: Surface,
    other: Surface,
    arrays: list[Array],
    notices: list[str],
) -> NDArray[np.int64]:
    """For each point of `mesh`, the row of `other` at the same place.

    Where several stand there with different values in `arrays`, those with the same direction of
    their cells belong together; what that leaves open goes by the order in the files, and is told.

    Raises: DataError where a point has no partner within 1e-5 of the mesh's size, or several that
        cannot be told apart where the two files have other numbers of points.
    """
    from scipy.spatial import cKDTree

    points = mesh.points.astype(np.float64)
    tree = cKDTree(other.points)
    distance, row = tree.query(points)
    far = distance > _PARTNER * float(np.linalg.norm(np.ptp(points, axis=0)))
    if far.any():
        raise DataError(
            f"{other_path}: {int(far.sum())} of {len(points)} points of {path} have no partner in "
            f"it (the farthest is {distance.max():.3g} away); give the file of the same mesh"
        )
    row = np.asarray(row, np.int64)
    step = 2 * float(np.spacing(np.float32(np.abs(points).max())))
    label = _groups(tree, step)
    groups = _ambiguous(label, arrays)
    if len(groups):
        _resolve(path, other_path, mesh, other, row, label, groups, notices)
    return row


def _groups(tree: Any, step: float) -> NDArray[np.int64]:
    """A number for each point, the same for those that stand together."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    pairs = tree.query_pairs(step, output_type="ndarray")
    graph = coo_array((np.ones(len(pairs), bool), pairs.T), shape=(tree.n, tree.n))
    return np.asarray(connected_components(graph, directed=False)[1], np.int64)


def _ambiguous(label: NDArray[np.int64], arrays: list[Array]) -> NDArray[np.int64]:
    """The groups whose points do not all have the same values."""
    first = np.zeros(label.max() + 1, np.int64)
    first[label[::-1]] = np.arange(len(label))[::-1]
    differs = np.zeros(len(label), bool)
    for array in arrays:
        values = array.reshape(len(array), -1)
        differs |= (values != values[first[label]]).any(axis=1)
    return np.unique(label[differs])


def _resolve(
    path: Path,
    other_path: Path,
    mesh: Surface,
    other: Surface,
    row: NDArray[np.int64],
    label: NDArray[np.int64],
    groups: NDArray[np.int64],
    notices: list[str],
) -> None:
    """Match the points of ambiguous groups by the normals of their cells, into `row`."""
    from scipy.optimize import linear_sum_assignment

    if other.num_cells:
        other.check(str(other_path))
    normals = [_directions(surface) for surface in (mesh, other)]
    alone = ~np.isin(label[row], groups)
    if np.einsum("nc,nc->", normals[0][alone], normals[1][row[alone]]) < 0:
        normals[1] *= -1  # the other file's polygons are wound the other way
    num_open = 0
    ours = np.flatnonzero(np.isin(label[row], groups))
    ours = ours[np.argsort(label[row[ours]], kind="stable")]
    theirs = np.flatnonzero(np.isin(label, groups))
    theirs = theirs[np.argsort(label[theirs], kind="stable")]
    here, there = label[row[ours]], label[theirs]
    for group in np.unique(here):
        mine = ours[slice(*np.searchsorted(here, [group, group + 1]))]
        hers = theirs[slice(*np.searchsorted(there, [group, group + 1]))]
        cost = np.linalg.norm(normals[0][mine][:, None] - normals[1][hers], axis=2)
        apart = np.linalg.norm(normals[1][hers][:, None] - normals[1][hers], axis=2)
        is_open = bool((apart + 9 * np.eye(len(hers)) < _ALIKE).any())
        if len(mine) != len(hers) and is_open:
            raise DataError(
                f"{other_path}: {len(hers)} points stand at {mesh.points[mine[0]]} with different "
                f"values, {len(mine)} in {path}, and the directions of their cells do not tell "
                "them apart; give files with the same points"
            )
        num_open += len(mine) if is_open else 0
        if len(mine) == len(hers):
            row[mine] = hers[linear_sum_assignment(np.round(cost, 3))[1]]
        else:
            row[mine] = hers[cost.argmin(axis=1)]
    if num_open:
        notices.append(
            f"{num_open} points that stand at one place with others were matched with "
            f"{other_path.name} by their order: their cells have one direction"
        )


def _directions(surface: Surface) -> NDArray[np.float64]:
    """Unit normals [P, 3] of the cells around each point; zero where there is none."""
    if surface.num_cells == 0:
        return np.zeros((surface.num_points, 3))
    vectors = dual_areas(surface, measure(surface).area_vector)[0]
    sizes: NDArray[np.float64] = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(sizes > 0, sizes, 1.0)
