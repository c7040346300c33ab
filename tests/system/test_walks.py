"""Two walks over all commands: from unknown files to a report, and with every source unchanged."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cpflare.files import checksum
from support.stores import SMALL, write_bodies

pv = pytest.importorskip("pyvista")

SETTINGS = (*SMALL, "train.steps=2", "data.tokens=all")


def cpflare(arguments, folder):
    """Run `cpflare …` there; what it says on both streams, and its status."""
    process = subprocess.run(
        [sys.executable, "-m", "cpflare.cli", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    return process.stdout + process.stderr, process.returncode


def next_commands(text):
    """The commands of the line that starts with `next:`, without `cpflare`."""
    (line,) = [line for line in text.splitlines() if line.startswith("next: ")]
    return [
        shlex.split(command)[1:]
        for command in line.removeprefix("next: ").split(" && ")
        if command.startswith("cpflare ")
    ]


@pytest.mark.slow
def test_every_message_leads_from_unknown_files_to_a_report(tmp_path):
    (tmp_path / "mine").mkdir()
    for number in range(6):
        body = pv.ParametricEllipsoid(1 + 0.1 * number, 0.5, 0.4, u_res=12, v_res=9).triangulate()
        body = body.clean()
        body.clear_data()
        body.point_data["p_kin"] = (body.points[:, 0] ** 2).astype("f4")
        body.save(tmp_path / f"mine/body{number}.vtp")

    text, status = cpflare(["prep", "mine", "mine.zarr"], tmp_path)
    assert status == 2
    assert text.count("p_kin") == 1  # one reason, once for all six
    (line,) = [line for line in text.splitlines() if line.startswith("next: ")]
    (drafting,) = re.findall(r"`cpflare (inspect \S+) > map\.yaml`", line)
    assert "--map map.yaml" in line

    draft, status = cpflare(shlex.split(drafting), tmp_path)
    assert status == 0
    (tmp_path / "map.yaml").write_text(draft)
    text, status = cpflare(["prep", "mine", "mine.zarr", "--map", "map.yaml"], tmp_path)
    assert status == 0, text

    (training,) = next_commands(text)
    assert "data.targets=[pressure]" in training
    text, status = cpflare([*training, *SETTINGS, "data.targets=[pressure]"], tmp_path)
    assert status == 0, text
    assert "embedded" not in text
    (predicting,) = next_commands(text)
    text, status = cpflare(predicting, tmp_path)
    assert status == 0, text
    for command in (commands := next_commands(text)):
        text, status = cpflare(command, tmp_path)
        assert status == 0, text
    assert [command[0] for command in commands] == ["evaluate", "report"]
    page = (tmp_path / "runs/mine/report.html").read_text()
    assert "Pressure" in page
    assert "made-up cars" not in page


@pytest.mark.slow
def test_sources_keep_their_checksums_through_every_command(tmp_path):
    bodies = tmp_path / "bodies"
    write_bodies(bodies)
    np.save(bodies / "extra.npy", np.zeros(3))
    kept = {}

    def keep(*folders):
        for folder in map(Path, folders):
            kept.update({p: checksum(p) for p in sorted(folder.rglob("*")) if p.is_file()})

    keep(bodies)
    mesh = next(iter(sorted(bodies.rglob("*.vtp"))))
    for arguments, made in (
        (["inspect", mesh], ()),
        (["prep", "bodies", "store"], ()),
        (["prep", "bodies", "store"], ("store",)),
        (["inspect", "store", "--verify"], ()),
        (["synth", "made", "--cases", "1", "--cells", "400"], ("made",)),
        (["convert", "store", "flare", "--layout", "flare"], ("flare",)),
        (["convert", "store", "curator", "--layout", "curator-v3"], ("curator",)),
        (["prep", "curator", "again"], ()),
        (["train", "data.store=store", "run.dir=run", *SETTINGS], ("run/config.yaml",)),
        (["predict", "run", "--split", "test", "--out", "out"], ()),
        (["predict", "run", "--mesh", mesh, "--out", "meshes"], ("meshes",)),
        (["evaluate", "out", "--store", "store"], ("out",)),
        (["export", "out", "--format", "npz-chunks"], ()),
        (["export", "out", "--format", "zarr"], ()),
        (["export", "out", "--format", "vtp", "--source", "bodies"], ()),
        (["report", "run", "--predictions", "out"], ()),
        (["plan", "--cells", "1e4", "--config", "run/config.yaml"], ()),
    ):
        text, status = cpflare(arguments, tmp_path)
        assert status == 0, (arguments, text)
        changed = [path for path, digest in kept.items() if checksum(path) != digest]
        assert not changed, arguments
        keep(*(tmp_path / name for name in made))
