"""Checkpoints, complete or absent: written aside, flushed, renamed, verified on loading."""

from __future__ import annotations

import errno
import json
import logging
import re
import threading
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from cpflare.errors import DataError
from cpflare.files import checksum, leftovers, one_line, remove, written_aside

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
    what, mend = f"checkpoint {target}", "free some space or set run.dir to another disk"
    with written_aside(target, durable=True, what=what, mend=mend) as aside:
        aside.mkdir()
        (aside / _MODEL).write_bytes(_serialise(model))
        with (aside / _OPTIMIZER).open("wb") as file:
            _save(optimizer, file)
        checksums = {name: checksum(aside / name) for name in (_MODEL, _OPTIMIZER)}
        content = {**state, "step": step, "checksums": checksums}
        (aside / _STATE).write_text(json.dumps(content, indent=1))
    _point_at(target)
    spared = {step_dir(directory, step) for step in [state.get("best_step")] if step is not None}
    old = [path for path in _complete(directory)[keep:] if path not in spared]
    for path in [*old, *leftovers(directory)]:
        remove(path)  # one that cannot be removed now is tried again after the next write
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
    names = {match[0]: None for path in leftovers(directory) if (match := _NAME.search(path.name))}
    notices = [f"the write of {directory / name} was cut short" for name in names]
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
    """Weights on `device`, optimiser values on the CPU, from where the optimiser takes each to its
    place, and state of a checkpoint. Executes nothing from the files.

    Raises:
        DataError: it is absent or damaged.
    """
    state = _verify(path)
    try:
        _require_plain_zip(path / _OPTIMIZER)
        weights = load_file(path / _MODEL, device=str(device))
        optimizer = torch.load(path / _OPTIMIZER, map_location="cpu", weights_only=True)
    except Exception as error:  # the two libraries raise many kinds for a file they cannot read
        line = one_line(error, 200)
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
        _point_at(rest[0])
    elif moved:
        (directory / _LATEST).unlink(missing_ok=True)
    return moved


def write_weights(path: Path, model: Mapping[str, Tensor]) -> None:
    """Write weights alone, whole or not at all, loadable without the trainer.

    Raises:
        DataError: the disk is full or the folder cannot be written.
    """
    mend = "free some space and start again"
    with written_aside(path, durable=True, what=f"weights {path}", mend=mend) as aside:
        aside.write_bytes(_serialise(model))


def _serialise(model: Mapping[str, Tensor]) -> bytes:
    # One storage may stand under two names; safetensors wants each tensor by itself. Its own writer
    # would not say whether the disk is full.
    return save({name: value.detach().cpu().contiguous() for name, value in model.items()})


def _save(values: Mapping[str, Any], file: BinaryIO) -> None:
    try:
        torch.save(values, file)
    except RuntimeError as error:  # behind which torch hides what the system said
        hidden = error.__context__
        raise (hidden if isinstance(hidden, OSError) else OSError(str(error))) from None


def _point_at(checkpoint: Path) -> None:
    """Name the newest checkpoint in a file beside it."""
    with written_aside(checkpoint.with_name(_LATEST), durable=True) as aside:
        aside.write_text(checkpoint.name + "\n")


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
        damaged = [n for n in (_MODEL, _OPTIMIZER) if checksum(path / n) != checksums[n]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"checkpoint {path} is damaged ({one_line(error)}); delete it") from error
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
