"""What cases of one store tell of each other: one in other units, two of the same content."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cpflare.data.store import natural_order

_UNITS = {1000.0: "millimetres", 100.0: "centimetres", 39.37: "inches", 3.281: "feet"}
_NEAR = 1.3  # a factor this close to one between units is taken for it
_LARGE = 200.0  # m


def remarks(cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Notices on whole cases, given by their attributes."""
    return [*_scales(cases), *_doubles(cases)]


def _scales(cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    names = natural_order(cases)
    sizes = {name: float(np.ptp(np.array(cases[name]["bounds"]), axis=1).max()) for name in names}
    usual = float(np.median(list(sizes.values()))) if sizes else 0.0
    if usual > _LARGE:
        return [
            f"the usual case is {usual:.4g} m long; if these are millimetres, give length_scale: "
            "0.001 in the map"
        ]
    found = []
    for name, size in sizes.items():
        for factor, unit in _UNITS.items():
            for ratio, than in ((size, usual), (usual, size)):
                if than > 0 and 1 / _NEAR < ratio / than / factor < _NEAR and size > 0:
                    kind = f"in {unit}" if ratio is size else f"in metres, the others in {unit}"
                    found.append(
                        f"{name} is {size:.4g} m long, the usual case {usual:.4g} m: it may be "
                        f"{kind}; bring all to one unit"
                    )
    return found


def _doubles(cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    owners: dict[str, list[str]] = {}
    for name in natural_order(cases):
        if digest := cases[name].get("source_checksum"):
            owners.setdefault(digest, []).append(name)
    return [
        f"{' and '.join(names[:3])} have meshes of the same content; leave one out, or they may be "
        "in training and test"
        for names in owners.values()
        if len(names) > 1
    ]
