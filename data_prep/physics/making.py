"""Makes the cases of a generated set, in any number of processes, and never over others' files.

A set is a few files of many cases. Cases come in the order of their numbers, so that the files are
the same with any number of processes, and each file is there whole or not at all.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from cpflare.errors import DataError
from cpflare.files import written_aside

Array = NDArray[Any]
Case = Mapping[str, Array]
"""The arrays of a case, by name."""

MARK: Final = "synth.json"
_AHEAD: Final = 4  # cases a process that are ready before they are asked for


@dataclass(frozen=True)
class Request:
    """What is to be made: `cases` cases of about `cells` rows of a `kind`, drawn from `seed`."""

    kind: str
    cases: int
    cells: int
    seed: int

    def check(self, cells: tuple[int, int]) -> None:
        """Refuse numbers that cannot be met; `cells` are the least and the most rows of a case.

        Raises: DataError that names the number and the option.
        """
        least, most = cells
        if self.cases < 1:
            raise DataError(f"cases={self.cases}: at least 1 is needed; set --cases 8")
        if not least <= self.cells <= most:
            raise DataError(
                f"cells={self.cells}: a case of {self.kind} has {least:,} to {most:,} rows; set "
                "--cells 4096"
            )
        if self.seed < 0:
            raise DataError(f"seed={self.seed}: seeds are not negative; set --seed 0")

    @property
    def side(self) -> int:
        """Rows along each side of a square grid of about `cells` rows."""
        return max(2, round(math.sqrt(self.cells)))


def generator(seed: int, case: int, stream: int = 0) -> np.random.Generator:
    """The random numbers of one case: a function of seed and case alone, in independent streams."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, case, stream))))


def claim(out: Path, request: Request, files: Sequence[Path]) -> None:
    """Make the folder `out` that of the request, before its files are written.

    Raises: DataError where one of the files is there already and another request made it.
    """
    if out.exists() and not out.is_dir():
        raise DataError(f"{out}: is a file; give the name of a folder")
    mark, text = out / MARK, json.dumps(asdict(request), indent=1) + "\n"
    there = next((path for path in files if path.exists() or path.is_symlink()), None)
    own = mark.is_file() and mark.read_text(errors="replace") == text
    if (there or mark.exists()) and not own:
        raise DataError(
            f"{there or mark} is there already, and not of --kind {request.kind} --cases "
            f"{request.cases} --cells {request.cells} --seed {request.seed}; name another folder, "
            "or remove it"
        )
    with written_aside(mark) as aside:
        aside.write_text(text)


def made(
    make: Callable[[Request, int], Case], request: Request, workers: int
) -> Iterator[tuple[int, Case]]:
    """Yield number and arrays of the cases 1 … `cases`, in order, made by `workers` processes.

    Raises: DataError for no worker; what `make` raises.
    """
    if workers < 1:
        raise DataError(f"workers={workers}: at least 1 is needed; set --workers 1")
    numbers = range(1, request.cases + 1)
    with tqdm(total=request.cases, unit="case", desc="synth", disable=None) as bar:
        for number, case in _run(make, request, numbers, min(workers, request.cases)):
            yield number, case
            bar.update()


def _run(
    make: Callable[[Request, int], Case], request: Request, numbers: range, workers: int
) -> Iterator[tuple[int, Case]]:
    if workers == 1:
        for number in numbers:
            yield number, make(request, number)
        return
    waiting: deque[tuple[int, Future[Case]]] = deque()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        try:
            for number in numbers:
                waiting.append((number, pool.submit(make, request, number)))
                if len(waiting) == _AHEAD * workers:
                    ready, job = waiting.popleft()
                    yield ready, job.result()
            for ready, job in waiting:
                yield ready, job.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def stacked(cases: Iterator[tuple[int, Case]], total: int) -> dict[str, Array]:
    """All cases' arrays along a new first axis, by name; one copy of the whole in memory."""
    out: dict[str, Array] = {}
    for number, case in cases:
        for name, values in case.items():
            if name not in out:
                out[name] = np.empty((total, *values.shape), values.dtype)
            out[name][number - 1] = values
    return out
