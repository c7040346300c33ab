"""What a run tells while it goes: metrics.jsonl, TensorBoard, a progress bar or lines of a log."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cpflare.errors import ConfigError
from cpflare.log import show_progress
from cpflare.train.run_dir import MetricsLog

logger = logging.getLogger("cpflare")

_LOG_EVERY_S = 10.0


class Reporter:
    """Reports of one process: rank 0's. The other ranks hold one that is silent."""

    def __init__(
        self, run_dir: Path, *, rank: int, first_step: int, total_steps: int, tensorboard: bool
    ) -> None:
        self.total_steps = total_steps
        self.log = MetricsLog(run_dir, keep_up_to_step=first_step) if rank == 0 else None
        self.writer: Any = None
        if rank == 0 and tensorboard:
            self.writer = _tensorboard(run_dir, first_step)
        # tqdm's own lock is a semaphore that outlives a rank which ends on a failure.
        tqdm.set_lock(threading.RLock())
        self.bar = tqdm(
            total=total_steps,
            initial=first_step,
            disable=not show_progress(rank),
            unit="step",
            dynamic_ncols=True,
        )
        self._shown_at = 0.0

    def step(self, event: Mapping[str, Any]) -> None:
        """One optimiser step."""
        if self.log is None:
            return
        self.log.write(event)
        self._scalars("train", event)
        self.bar.update(1)
        self.bar.set_postfix(loss=f"{event['loss']:.3g}", refresh=False)
        due = time.monotonic() - self._shown_at > _LOG_EVERY_S or event["step"] == self.total_steps
        if due and self.bar.disable:
            self._shown_at = time.monotonic()
            logger.info(
                "step %d of %d: loss %.4g, %.3g cells/s, %.2f s a step",
                event["step"],
                self.total_steps,
                event["loss"],
                event["tokens_per_s"],
                event["step_s"],
            )

    def evaluation(self, event: Mapping[str, Any], shown: Sequence[str]) -> None:
        """One evaluation; `shown` are the entries that the log line names."""
        if self.log is None:
            return
        self.log.write(event)
        self._scalars("eval", event)
        values = ", ".join(f"{name} {event[name]:.4f}" for name in shown)
        with tqdm.external_write_mode():
            logger.info("step %d: validation %s", event["step"], values)

    def sync(self) -> None:
        """Make what was told as lasting as a checkpoint that is written now."""
        if self.log is not None:
            self.log.sync()

    def close(self) -> None:
        """Hand everything to the disk."""
        self.bar.close()
        if self.log is not None:
            self.log.close()
        if self.writer is not None:
            self.writer.close()

    def _scalars(self, kind: str, event: Mapping[str, Any]) -> None:
        if self.writer is None:
            return
        for name, value in event.items():
            if isinstance(value, int | float) and name != "step":
                self.writer.add_scalar(f"{kind}/{name}", value, event["step"])


def _tensorboard(run_dir: Path, first_step: int) -> Any:
    """A writer that hides what was told of the steps after `first_step`, which come again."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "train.tensorboard=true needs the tensorboard package; pip install cpflare[tensorboard]"
        ) from error
    return SummaryWriter(run_dir / "tensorboard", purge_step=first_step + 1)
