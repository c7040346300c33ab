"""Checkpoints, complete or absent: written aside, flushed, renamed, verified on loading."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from cpflare.errors import DataError

_STATE, _MODEL, _OPTIMIZER = "state.json", "model.safetensors", "optimizer.pt"


def step_dir(directory: Path, step: int) -> Path:
    """The folder of the checkpoint after `step` steps."""
    return directory / f"step_{step:08d}"


def save_checkpoint(
    directory: Path,
    step: int,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Any],
    state: Mapping[str, Any],
    *,
    keep: int,
) -> Path:
    """Write a checkpoint; one process does it. Keeps the newest `keep` and the best.

    `model` are weights, `optimizer` nested plain values and tensors, `state` plain values among
    which `best_step` names the checkpoint to spare. A crash at any moment leaves the previous ones
    in use.

    Raises:
        DataError: the disk is full or the folder cannot be written; nothing half-written stays.
    """
    target = step_dir(directory, step)
    aside = directory / f".{target.name}.partial"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        # One storage may stand under two names; safetensors wants each tensor by itself.
        tensors = {name: value.detach().cpu().contiguous() for name, value in model.items()}
        save_file(tensors, aside / _MODEL)
        torch.save(optimizer, aside / _OPTIMIZER)
        checksums = {name: _checksum(aside / name) for name in (_MODEL, _OPTIMIZER)}
        content = {**state, "step": step, "checksums": checksums}
        (aside / _STATE).write_text(json.dumps(content, indent=1))
        for name in (_MODEL, _OPTIMIZER, _STATE):
            _flush(aside / name)
        shutil.rmtree(target, ignore_errors=True)
        aside.rename(target)
        _write_text(directory / "latest", target.name + "\n")
        _flush(directory)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise DataError(
            f"checkpoint {target} cannot be written ({' '.join(str(error).split())}); free some "
            "space or set run.dir to another disk"
        ) from error
    spared = {step_dir(directory, step) for step in [state.get("best_step")] if step is not None}
    for old in _complete(directory)[keep:]:
        if old not in spared:
            shutil.rmtree(old)
    return target


def find_checkpoint(directory: Path) -> tuple[Path | None, list[str]]:
    """The newest complete and undamaged checkpoint, and a notice for each newer one passed over."""
    notices = []
    for path in _complete(directory):
        try:
            _verify(path)
        except DataError as error:
            notices.append(f"{error}; using an older one")
        else:
            return path, notices
    return None, notices


def load_checkpoint(
    path: Path, device: torch.device
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """Weights, optimiser values and state of a checkpoint. Executes nothing from the files.

    Raises:
        DataError: it is absent or damaged.
    """
    state = _verify(path)
    try:
        weights = load_file(path / _MODEL, device=str(device))
        optimizer = torch.load(path / _OPTIMIZER, map_location=device, weights_only=True)
    except Exception as error:  # the two libraries raise many kinds for a file they cannot read
        raise DataError(f"checkpoint {path} cannot be read ({error}); delete it") from error
    return weights, optimizer, state


def write_weights(path: Path, model: Mapping[str, Tensor]) -> None:
    """Write weights alone, whole or not at all, loadable without the trainer."""
    aside = path.with_name(f".{path.name}.partial")
    save_file({name: value.detach().cpu().contiguous() for name, value in model.items()}, aside)
    _flush(aside)
    aside.replace(path)


def _complete(directory: Path) -> list[Path]:
    """Checkpoints that were renamed into place, newest first."""
    return sorted((p for p in directory.glob("step_*") if (p / _STATE).is_file()), reverse=True)


def _verify(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((path / _STATE).read_text())
        checksums = dict(state["checksums"])
        damaged = [n for n in (_MODEL, _OPTIMIZER) if _checksum(path / n) != checksums[n]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"checkpoint {path} is damaged ({error}); delete it") from error
    if damaged:
        raise DataError(f"checkpoint {path}: {damaged[0]} is damaged (its checksum differs)")
    return state


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_text(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(text)
    _flush(aside)
    aside.replace(path)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
