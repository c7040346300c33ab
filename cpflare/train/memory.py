"""A step that does not fit into a rank's memory: what it was, for whoever knows the mend."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from cpflare.data.sampler import Window
from cpflare.parallel.runtime import NoMemoryError, no_memory


class StepTooLarge(NoMemoryError):
    """A lack of memory in a step of cases of at most `cells` cells.

    `held_bytes` of the device's `total_bytes` were this process's at most.
    """

    def __init__(self, why: str, cells: int, held_bytes: int, total_bytes: int) -> None:
        self.cells, self.held_bytes, self.total_bytes = cells, held_bytes, total_bytes
        super().__init__(
            f"out of memory ({why}); this rank held {held_bytes / 2**30:.3g} of "
            f"{total_bytes / 2**30:.3g} GiB, with cases of {cells:,} cells"
        )


@contextmanager
def telling_size(windows: Sequence[Window], device: torch.device) -> Iterator[None]:
    """Turn a lack of memory inside into `StepTooLarge`."""
    try:
        yield
    except Exception as error:
        if not no_memory(error):
            raise
        why = (str(error) or type(error).__name__).splitlines()[0]
        cells = max(window.size for window in windows)
        raise StepTooLarge(why, cells, peak_bytes(device), total_bytes(device)) from error


def peak_bytes(device: torch.device) -> int:
    """The most memory held so far: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def total_bytes(device: torch.device) -> int:
    """The memory of the device; ranks of a CPU share it."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
