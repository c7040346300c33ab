"""Tiny data and runs for tests: stores of fields on ellipsoids, meshes as VTP files, trainings."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from cpflare.config import load_config
from cpflare.data.store import Store
from cpflare.data.store_writer import StoreWriter
from cpflare.log import set_up_logging
from cpflare.parallel.topology import build_topology
from cpflare.train.loop import train

FIELD_MAP = {
    "association": "cell",
    "fields": {
        "pressure": {"names": ["pMeanTrim"]},
        "wall_shear": {"names": ["wallShearStressMeanTrim"]},
    },
    "axes": ["x", "y", "z"],
    "shear_sign": -1,
    "winding": "inward",
}
ATTRS = {
    "reference": {"speed": 38.889, "rho": 1.0, "area": 2.17, "length": 2.786, "centre": [1, 0, 0]},
    "shear_sign": -1,
    "units": {"pressure": "m2/s2", "wall_shear": "m2/s2"},
    "notices": [],
}

# None is divisible by 2 and 3 alike, and run_5 has fewer rows than three ranks.
SIZES = {"run_1": 101, "run_2": 157, "run_3": 128, "run_4": 113, "run_5": 2}
SPLITS = {"train": ["run_1", "run_2", "run_3", "run_5"], "val": ["run_4"], "test": []}

SMALL = (
    "model.channels=16",
    "model.heads=2",
    "model.blocks=2",
    "model.latents=4",
    "train.warmup=0.3",
)
"""Overrides of a model that is large enough to be every part of itself and no larger."""


def flow(position, normal, size):
    """Pressure and wall shear that depend on place, direction and size, of DrivAerML's scale."""
    x, _, z = position.T
    pressure = 750 * normal[:, 0] ** 2 - 300 * size + 40 * np.sin(3 * x) * normal[:, 2]
    along = np.array([-1.0, 0.0, 0.1]) - normal * (normal @ [-1.0, 0.0, 0.1])[:, None]
    return pressure, along * (1.5 + np.cos(2 * z + size))[:, None]


def ellipsoid_fields(num_rows, seed):
    """Canonical fields of scattered rows of an ellipsoid, in source order, and its offset."""
    rng = np.random.default_rng([seed, num_rows])
    axes = np.array([2.2, 0.9, 0.6]) * rng.uniform(0.8, 1.2, 3)
    unit = rng.normal(size=(num_rows, 3))
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    position = unit * axes + [1.4, 0.0, 0.6]
    normal = unit / axes
    normal /= np.linalg.norm(normal, axis=1, keepdims=True)
    area = rng.uniform(0.5, 1.5, num_rows) * 20 / num_rows
    pressure, shear = flow(position, normal, axes[2])
    offset = (position.min(axis=0) + position.max(axis=0)) / 2
    return {
        "position": position,
        "normal": normal.astype(np.float32),
        "area": area,
        "area_vector": normal * area[:, None],
        "pressure": pressure.astype(np.float32),
        "wall_shear": shear.astype(np.float32),
    }, offset


def write_store(path, sizes=None, splits=None, *, seed=3, change=None, field_map=None):
    """A store of ellipsoids through the real writer; `change(name, fields)` may alter a case."""
    writer = StoreWriter(Path(path), "made", field_map or FIELD_MAP, seed)
    writer.begin()
    records = {}
    for number, (name, num_rows) in enumerate((sizes or SIZES).items()):
        fields, offset = ellipsoid_fields(num_rows, number)
        if change is not None:
            change(name, fields)
        records[name] = writer.write_case(
            name, fields, association="cell", offset=offset, attrs=ATTRS
        )
    writer.finish(records, splits or SPLITS)
    return Store.open(path)


def ring_mesh(around, rings, *, scale=(2.2, 0.9, 0.6), centre=(1.4, 0.0, 0.6)):
    """Closed body of `around` * (`rings` + 1) cells, quads between triangles, wound inward."""
    theta = np.pi * np.arange(1, rings + 1) / (rings + 1)
    # The turn keeps the body from being symmetric, so that no two cells look alike.
    phi = 2 * np.pi * np.arange(around) / around + 0.1
    ring = [
        np.stack([np.full(around, np.cos(t)), np.sin(t) * np.cos(phi), np.sin(t) * np.sin(phi)], 1)
        for t in theta
    ]
    points = np.concatenate([[[1.0, 0, 0]], *ring, [[-1.0, 0, 0]]])
    points = points * scale * (1 + 0.1 * points[:, :1]) + centre
    after = [*range(1, around), 0]
    first = lambda r, k: 1 + r * around + k  # noqa: E731
    faces = [[0, first(0, after[k]), first(0, k)] for k in range(around)]
    for r in range(rings - 1):
        faces += [
            [first(r, k), first(r, after[k]), first(r + 1, after[k]), first(r + 1, k)]
            for k in range(around)
        ]
    last = len(points) - 1
    faces += [[last, first(rings - 1, k), first(rings - 1, after[k])] for k in range(around)]
    return points, faces


def write_mesh(path, points, faces, *, fields=True, dtype=np.float32):
    """Write polygons as DrivAerML lays them out: inward winding, cell data, another array too."""
    import pyvista as pv

    mesh = pv.PolyData(
        np.asarray(points, dtype), faces=np.concatenate([[len(face), *face] for face in faces])
    )
    if fields:
        corners = [np.asarray(points)[face] for face in faces]
        centre = np.array([c.mean(axis=0) for c in corners])
        outward = -np.array([np.cross(c[1] - c[0], c[2] - c[0]) for c in corners])
        outward /= np.linalg.norm(outward, axis=1, keepdims=True)
        local = centre - np.mean(points, axis=0)
        pressure, shear = flow(local, outward, np.ptp(points[:, 2]))
        mesh.cell_data["pMeanTrim"] = pressure.astype(np.float32)
        mesh.cell_data["CpMeanTrim"] = (pressure / 756.2).astype(np.float32)
        mesh.cell_data["wallShearStressMeanTrim"] = shear.astype(np.float32)
        mesh.point_data["height"] = np.asarray(points)[:, 2].astype(np.float64)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    mesh.save(path)
    return path


BODIES = {1: (11, 10), 2: (13, 8), 3: (9, 11), 4: (11, 9)}
"""Cells around and rings of four bodies with 121, 117, 108 and 110 cells."""


def write_bodies(folder):
    """Four bodies of different shapes as FOLDER/run_N/boundary_N.vtp, and FOLDER/splits.json."""
    folder = Path(folder)
    for number, (around, rings) in BODIES.items():
        scale = np.array([2.2, 0.9, 0.6]) * (1 + 0.05 * np.array([number, -number, 2 * number]))
        points, faces = ring_mesh(around, rings, scale=scale)
        write_mesh(folder / f"run_{number}" / f"boundary_{number}.vtp", points, faces)
    splits = {"train": ["run_1", "run_2"], "val": ["run_3"], "test": ["run_4"]}
    (folder / "splits.json").write_text(json.dumps(splits))
    return folder


def read_metrics(run_dir, kind="step"):
    """The lines of metrics.jsonl of one kind."""
    lines = (Path(run_dir) / "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def read_weights(run_dir):
    """The final weights of a run."""
    return load_file(Path(run_dir) / "model.safetensors")


def train_rank(rank, world_size, overrides):
    """One rank's part of a training; for `run_ranks`, or (0, 1, …) in the process of a test.

    Returns what the rank wrote on standard error.
    """
    config = load_config(None, overrides)
    with contextlib.redirect_stderr(io.StringIO()) as text:
        set_up_logging(rank, world_size)
        train(config, build_topology(config.parallel, torch.device("cpu")))
    return text.getvalue()
