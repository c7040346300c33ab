"""A process that may be one of many: agreement on errors, exit statuses, one message."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from cpflare.errors import CpflareError, NonFiniteError
from cpflare.parallel.comm import Communicator
from cpflare.parallel.topology import environment_ranks

USER_ERROR = 2
"""Exit status for what a user can mend."""


def run_guarded(main: Callable[[], None], *, debug: bool = False) -> int:
    """Run a worker's main; returns its exit status.

    A user's error is one line on standard error and status 2, without a traceback unless `debug`.
    An error that all ranks have (a configuration, say) is printed by rank 0 alone; one that a
    single rank meets is printed by that rank, with its number.
    """
    rank, world_size, _ = environment_ranks()
    try:
        main()
        return 0
    except (AgreedError, NonFiniteError) as error:  # of reduced values, so that all ranks have it
        if rank == 0:
            _print_error(str(error), debug)
        _linger(rank)
        return USER_ERROR
    except CpflareError as error:
        where = f"[rank {rank}] " if world_size > 1 else ""
        _print_error(f"{where}{error}", debug)
        return USER_ERROR
    finally:
        # After an error the other ranks may wait in a collective; leaving is what ends them.
        if dist.is_initialized() and sys.exc_info()[0] is None:
            dist.destroy_process_group()


class AgreedError(CpflareError):
    """An error that every rank knows of, so that rank 0 can speak for all."""


@contextmanager
def agreed(comm: Communicator) -> Iterator[None]:
    """Turn an error that any rank meets inside into the same `AgreedError` on all ranks.

    For set-up work that communicates nothing itself: every rank reaches the end of the block, where
    the messages are exchanged (two small all-gathers).
    """
    message = ""
    try:
        yield
    except CpflareError as error:
        message = str(error)
    messages = comm.gather_texts(message)
    for rank, text in enumerate(messages):
        if text:
            alone = comm.size > 1 and any(other != text for other in messages)
            raise AgreedError(f"[rank {rank}] {text}" if alone else text)


@contextmanager
def same_on_all() -> Iterator[None]:
    """For what every rank does with the same arguments: an error inside is every rank's error."""
    try:
        yield
    except CpflareError as error:
        raise AgreedError(str(error)) from error


def _print_error(message: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    print(f"error: {message}", file=sys.stderr, flush=True)


def _linger(rank: int) -> None:
    """Let rank 0 speak before this rank's exit makes the launcher end the others."""
    if rank > 0:
        time.sleep(1.0)
