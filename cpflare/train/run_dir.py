"""The files of a run: its resolved configuration, its metrics, and reading them back."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cpflare.config import Config, config_from_dict
from cpflare.data.mark import MARK, read_mark
from cpflare.data.normalize import Normalizer
from cpflare.data.store import Case, Store
from cpflare.errors import ConfigError, DataError
from cpflare.files import leftovers, one_line, real, remove, writing, written_aside

logger = logging.getLogger("cpflare")

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL)
"""What file systems without locks on folders answer: there the user must take care."""
_MEND = "name another folder"

CONFIG, METRICS, WEIGHTS, CHECKPOINTS = (
    "config.yaml",
    "metrics.jsonl",
    "model.safetensors",
    "checkpoints",
)


@dataclass(frozen=True)
class RunDescription:
    """RUN_DIR/config.yaml: the configuration, and what prediction needs of the data set."""

    config: Config
    normalizer: Normalizer
    dataset: Mapping[str, Any]  # what `describe_dataset` gives, and where the store is
    path: Path = Path()  # the run's folder

    @property
    def field_map(self) -> dict[str, Any]:
        """The field map of the store that the run was trained on."""
        return dict(self.dataset["field_map"])

    def was_trained_on(self, case: Case) -> bool | None:
        """Whether a case was trained on: its source's content, under any name, or its name.

        None where that is not known: the run does not say, as those of version 0.1.0 don't, or it
        has a case of this name with another content, which may be the same shape solved again, or
        a case of another data set.
        """
        known: Mapping[str, str | None] | None = self.dataset.get("train_cases")
        if known is None:
            return None
        digest = case.attrs.get("source_checksum")
        if digest is not None and digest in known.values():
            return True
        if case.name not in known:
            return False
        return True if None in (digest, known[case.name]) else None

    def find_store(self) -> Path:
        """The store that the run was trained on: where it was, or beside the run where both moved.

        Of several complete ones, that of the same content.

        Raises:
            DataError: none is there.
        """
        recorded = self.dataset.get("store") or {}
        known = [Path(recorded["absolute"])] if "absolute" in recorded else []
        known += [self.path / recorded["relative"]] if "relative" in recorded else []
        places = [*known, Path(self.config.data.store)]
        found = [path for path in places if (path / MARK).is_file()]
        same = [p for p in found if read_mark(p)["identity"] == self.dataset["store_identity"]]
        if not found:
            looked = " or ".join(dict.fromkeys(os.path.normpath(path) for path in places))
            raise DataError(
                f"the store of run {self.path} is not at {looked}; say with --store where it is"
            )
        return (same or found)[0]


@contextmanager
def hold_run(run_dir: Path) -> Iterator[None]:
    """Keep a second training off a run's folder while inside. One process holds it.

    Raises:
        ConfigError: the folder cannot be made.
        DataError: another training holds it.
    """
    with writing(f"run.dir={run_dir}", _MEND, ConfigError):
        run_dir.mkdir(parents=True, exist_ok=True)
        handle = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise DataError(
            f"run.dir={run_dir} is in use by another training; give this one another run.dir"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(handle)
            raise
    try:
        for name in (CONFIG, METRICS, WEIGHTS):
            for path in leftovers(run_dir, name):
                remove(path)
        yield
    finally:
        os.close(handle)


def describe_dataset(
    store: Store,
    normalizer: Normalizer,
    train_cases: Sequence[str],
    earlier: Mapping[str, str | None],
) -> dict[str, Any]:
    """The `dataset` section: field map (with winding and reference), statistics, identity, and the
    training cases with the checksums of their sources, where the store has them.

    `earlier` are those of the run that the weights come from.
    """
    cases = {name: store.case(name).attrs.get("source_checksum") for name in train_cases}
    return {
        "train_cases": {**earlier, **cases},
        "train_rows": [pick(store.rows[name] for name in train_cases) for pick in (min, max)],
        "embedded": store.embedded,
        "name": store.dataset,
        "field_map": store.field_map,
        "store_identity": store.identity,
        "statistics_hash": store.statistics.hash,
        "statistics": store.statistics.to_dict(),
        "normalizer": normalizer.to_dict(),
    }


def write_config(run_dir: Path, config: Config, dataset: Mapping[str, Any]) -> None:
    """Write RUN_DIR/config.yaml whole or not at all; it also says where the store is.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    store = real(Path(config.data.store))
    relative = os.path.relpath(store, real(run_dir))
    places = {"absolute": str(store), "relative": relative}
    content = {**config.to_dict(), "dataset": {**dataset, "store": places}}
    what = f"run.dir={run_dir}"
    with written_aside(run_dir / CONFIG, what=what, mend=_MEND, kind=ConfigError) as aside:
        aside.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def read_run(run_dir: Path) -> RunDescription:
    """Read RUN_DIR/config.yaml.

    Raises:
        DataError: there is no run, or its configuration is damaged.
    """
    path = run_dir / CONFIG
    if not path.is_file():
        raise DataError(f"run {run_dir} does not exist (no {CONFIG}); train it first")
    try:
        content = yaml.safe_load(path.read_text())
        dataset = content.pop("dataset")
        normalizer = Normalizer.from_dict(dataset["normalizer"])
    except (yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path} is damaged ({one_line(error)}); train again or restore it"
        ) from error
    return RunDescription(config_from_dict(content), normalizer, dataset, run_dir)


def cases_behind(checkpoint: Path) -> dict[str, str | None]:
    """The training cases that the run of a checkpoint names; none where it does not say."""
    try:
        return dict(read_run(checkpoint.parent.parent).dataset.get("train_cases") or {})
    except DataError:  # a checkpoint stands by itself
        return {}


class MetricsLog:
    """RUN_DIR/metrics.jsonl: one whole line an event, written by one process.

    A line that the disk has no room for waits for the next one.
    """

    def __init__(self, run_dir: Path, *, keep_up_to_step: int) -> None:
        """Continue after `keep_up_to_step` steps: later lines of an interrupted run are dropped."""
        self.path = run_dir / METRICS
        kept = []
        if keep_up_to_step > 0 and self.path.is_file():
            for line in self.path.read_text(errors="replace").splitlines():
                try:
                    event = json.loads(line)
                except json.JSONDecodeError:
                    continue  # the line that the interruption cut short
                if event.get("step", 0) <= keep_up_to_step:
                    kept.append(line)
        with written_aside(self.path) as aside:
            aside.write_text("".join(f"{line}\n" for line in kept))
        self._file = self.path.open("ab", buffering=0)
        self._size = self.path.stat().st_size
        self._waiting = b""

    def write(self, event: Mapping[str, Any]) -> None:
        """Append one line and hand it to the operating system.

        What is not finite becomes null, as JSON has no NaN.
        """
        full = bool(self._waiting)
        known = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in event.items()
        }
        self._waiting += json.dumps(known, allow_nan=False).encode() + b"\n"
        try:
            self._append()
        except OSError as error:
            if not full:
                logger.warning("notice: %s cannot be written for now (%s)", self.path, error)

    def _append(self) -> None:
        rest = self._waiting
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(self._size)  # no half a line
            raise
        self._size += len(self._waiting)
        self._waiting = b""

    def sync(self) -> None:
        """Bring the lines to the disk, so that they are as lasting as a checkpoint."""
        if not self._waiting:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Write what is left.

        Raises:
            DataError: the disk has no room for the last lines.
        """
        mend = "free some space, the last lines are lost"
        with closing(self._file), writing(str(self.path), mend):
            self._append()
