"""Checkpoints, complete or absent: written aside, flushed, renamed, verified on loading."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import textwrap
import threading
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from cpflare.errors import DataError

logger = logging.getLogger("cpflare")

_STATE, _MODEL, _OPTIMIZER = "state.json", "model.safetensors", "optimizer.pt"
_LATEST = "latest"
_LONGEST_STATE = 2**26
_WANT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NAME = re.compile(r"step_(\d{8,})")


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
        _write_bytes(aside / _MODEL, _serialise(model))
        with (aside / _OPTIMIZER).open("wb") as file:
            torch.save(optimizer, file)
        checksums = {name: _checksum(aside / name) for name in (_MODEL, _OPTIMIZER)}
        content = {**state, "step": step, "checksums": checksums}
        (aside / _STATE).write_text(json.dumps(content, indent=1))
        for path in (aside / _MODEL, aside / _OPTIMIZER, aside / _STATE, aside):
            _flush(path)
        if target.is_dir():  # a folder cannot be replaced by renaming
            replaced = directory / f".{target.name}.replaced.partial"
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
        aside.rename(target)
        _write_text(directory / _LATEST, target.name + "\n")
        _flush(directory)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise DataError(
            f"checkpoint {target} cannot be written ({' '.join(str(error).split())}); free some "
            "space or set run.dir to another disk"
        ) from error
    spared = {step_dir(directory, step) for step in [state.get("best_step")] if step is not None}
    old = [path for path in _complete(directory)[keep:] if path not in spared]
    for path in [*old, *directory.glob(".step_*.partial")]:
        # One that cannot be removed now is tried again after the next write.
        shutil.rmtree(path, ignore_errors=True)
    return target


class CheckpointWriter:
    """Writes checkpoints in the background, one at a time; one process has one.

    A write that fails for want of space is a notice, since space may be found until the next: the
    checkpoint before it stays in use, and training goes on. Of the last write it is an error, and
    so is any other failure of a write.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory, self.keep = directory, keep
        self._thread: threading.Thread | None = None
        self._failure: DataError | None = None

    def submit(
        self,
        step: int,
        model: Mapping[str, Tensor],
        optimizer: Mapping[str, Any],
        state: Mapping[str, Any],
    ) -> None:
        """Copy the values to the host's memory and return; waits for the write before, if any.

        Raises:
            DataError: that one failed for good.
        """
        self.wait()
        self.check()
        values = snapshot(model), snapshot(optimizer)
        self._thread = threading.Thread(
            target=self._write, args=(step, *values, dict(state)), name="checkpoint", daemon=True
        )
        self._thread.start()

    def _write(
        self,
        step: int,
        model: Mapping[str, Tensor],
        optimizer: Mapping[str, Any],
        state: Mapping[str, Any],
    ) -> None:
        self._failure = None
        try:
            save_checkpoint(self.directory, step, model, optimizer, state, keep=self.keep)
        except DataError as error:
            self._failure = error
        except Exception as error:  # a thread's exception is seen nowhere else
            self._failure = DataError(f"checkpoint of step {step}: {type(error).__name__}: {error}")
            self._failure.__cause__ = error
        if self._failure is not None and self._may_pass():
            before = _complete(self.directory)
            use = f"{before[0].name} stays in use" if before else "there is none before it"
            logger.warning("notice: %s; %s", self._failure, use)

    def _may_pass(self) -> bool:
        cause = self._failure and self._failure.__cause__
        return isinstance(cause, OSError) and cause.errno in _WANT_OF_SPACE

    def wait(self) -> None:
        """Wait for a write that is under way."""
        if self._thread is not None:
            self._thread.join()

    def check(self) -> None:
        """Raise DataError if a write has failed for good."""
        if self._failure is not None and not self._may_pass():
            raise self._failure

    def finish(self) -> None:
        """Wait for the last write.

        Raises:
            DataError: it failed.
        """
        self.wait()
        if self._failure is not None:
            raise self._failure


def snapshot(value: Any) -> Any:
    """A copy of nested values whose tensors lie in the host's memory, shared with nothing."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True).contiguous()
    if isinstance(value, Mapping):
        return {key: snapshot(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(snapshot(item) for item in value)
    return value


def find_checkpoint(directory: Path) -> tuple[Path | None, list[str]]:
    """The newest complete and undamaged checkpoint, and a notice for each newer one passed over."""
    notices = [
        f"the write of {directory / left.name.removesuffix('.partial')[1:]} was cut short"
        for left in sorted(directory.glob(".step_*.partial"))
    ]
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
        _require_plain_zip(path / _OPTIMIZER)
        weights = load_file(path / _MODEL, device=str(device))
        optimizer = torch.load(path / _OPTIMIZER, map_location=device, weights_only=True)
    except Exception as error:  # the two libraries raise many kinds for a file they cannot read
        line = textwrap.shorten(str(error), 200)
        raise DataError(f"checkpoint {path} cannot be read ({line}); delete it") from error
    if not isinstance(optimizer, dict):
        raise DataError(f"checkpoint {path}: {_OPTIMIZER} is none of this program's; delete it")
    return weights, optimizer, state


def set_aside(directory: Path, after_step: int, aside: Path) -> list[Path]:
    """Move the checkpoints of later steps into `aside`: they belong to a run that is given up."""
    moved = []
    for path in _complete(directory):
        if int(path.name.removeprefix("step_")) > after_step:
            aside.mkdir(parents=True, exist_ok=True)
            moved.append(path.rename(aside / path.name))
    rest = _complete(directory)
    if moved and rest:
        _write_text(directory / _LATEST, rest[0].name + "\n")
    elif moved:
        (directory / _LATEST).unlink(missing_ok=True)
    return moved


def write_weights(path: Path, model: Mapping[str, Tensor]) -> None:
    """Write weights alone, whole or not at all, loadable without the trainer.

    Raises:
        DataError: the disk is full or the folder cannot be written.
    """
    aside = path.with_name(f".{path.name}.partial")
    try:
        _write_bytes(aside, _serialise(model))
        _flush(aside)
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise DataError(
            f"weights {path} cannot be written ({error}); free some space and start again"
        ) from error


def _serialise(model: Mapping[str, Tensor]) -> bytes:
    # One storage may stand under two names; safetensors wants each tensor by itself.
    return save({name: value.detach().cpu().contiguous() for name, value in model.items()})


def _write_bytes(path: Path, data: bytes) -> None:
    # Not by the libraries' own writers: their errors do not say whether the disk is full.
    path.write_bytes(data)


def _complete(directory: Path) -> list[Path]:
    """Checkpoints that were renamed into place, newest first."""
    found = {
        int(match[1]): path
        for path in directory.glob("step_*")
        if (match := _NAME.fullmatch(path.name)) and (path / _STATE).is_file()
    }
    return [found[step] for step in sorted(found, reverse=True)]


def _verify(path: Path) -> dict[str, Any]:
    """The state of a checkpoint whose files are whole."""
    try:
        if (path / _STATE).stat().st_size > _LONGEST_STATE:
            raise ValueError(f"{_STATE} is longer than {_LONGEST_STATE} bytes")
        state: dict[str, Any] = json.loads((path / _STATE).read_text())
        checksums = dict(state["checksums"])
        damaged = [n for n in (_MODEL, _OPTIMIZER) if _checksum(path / n) != checksums[n]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        line = " ".join(str(error).split())
        raise DataError(f"checkpoint {path} is damaged ({line}); delete it") from error
    if damaged:
        raise DataError(f"checkpoint {path}: {damaged[0]} is damaged (its checksum differs)")
    return state


def _require_plain_zip(path: Path) -> None:
    """Raise ValueError unless a file of torch holds its tensors as they are.

    Compressed ones, and torch's older formats, would take memory by what their headers say.
    """
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > entry.compress_size:
                raise ValueError(f"{entry.filename} in {path.name} is compressed")


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
