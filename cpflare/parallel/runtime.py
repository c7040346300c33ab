"""A process that may be one of many: agreement on errors, exit statuses, one message."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from cpflare.errors import CpflareError, DataError, NonFiniteError, TopologyError
from cpflare.files import explain, one_line
from cpflare.lifeline.hub import FAILED, print_error
from cpflare.lifeline.launcher import watch_launcher
from cpflare.lifeline.lifeline import own_lifeline
from cpflare.parallel.comm import Communicator
from cpflare.parallel.topology import environment_ranks

USER_ERROR = 2
"""Exit status for what a user can mend."""

STOPPED = 75
"""Exit status of a run that a signal stopped and that the same command goes on with (EX_TEMPFAIL).
"""

_INTERRUPTED = 130
_LONGEST_MESSAGE = 1000
_COLLECTIVE = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|broken pipe|tcpstore", re.IGNORECASE
)
_SOURCE_LINE = re.compile(r"\[\S+:\d+\] ")
_NO_MEMORY = re.compile(r"can't allocate memory|not enough memory|out of memory", re.IGNORECASE)


class Stopped(Exception):
    """A run that ends before its last step because it was asked to; its state is on the disk."""


def run_guarded(main: Callable[[], None], *, debug: bool = False) -> int:
    """Run a worker's main; returns its exit status.

    A user's error is one line on standard error and status 2, without a traceback unless `debug`.
    An error that all ranks have (a configuration, say) is printed by rank 0 alone; so is one that
    a single rank meets, with the rank and what it was doing, and all ranks end.
    """
    lifeline = own_lifeline()
    lifeline.place = ""  # what this process did before, as tests do, is over
    watch_launcher(lifeline.abandon)
    try:
        status = _status_of(main)
        lifeline.leave()
    except (AgreedError, NonFiniteError) as error:  # of reduced values, so that all ranks have it
        _end_alike(str(error), debug)
        status = USER_ERROR
    except CpflareError as error:
        _end_alone(error, USER_ERROR, show=debug)
        status = USER_ERROR
    except (OSError, UnicodeError) as error:
        # Of files and their names; a neighbour that is gone comes as a broken connection.
        if isinstance(error, ConnectionError | TimeoutError):
            _end_alone(error, FAILED, show=True)
            status = FAILED
        else:
            _end_alone(DataError(explain(error)), USER_ERROR, show=debug)
            status = USER_ERROR
    except KeyboardInterrupt as error:
        _end_alone(error, _INTERRUPTED, show=debug)
        status = _INTERRUPTED
    except Exception as error:
        # Whatever it is, the other ranks must hear of it. A line says enough about a lack of memory
        # and about a neighbour that is gone; anything else may be a bug.
        _end_alone(error, FAILED, show=debug or not (no_memory(error) or _may_be_anothers(error)))
        status = FAILED
    else:
        if dist.is_initialized():
            dist.destroy_process_group()
    lifeline.write_status(status)
    return status


def _status_of(main: Callable[[], None]) -> int:
    try:
        main()
    except Stopped:
        return STOPPED
    return 0


class NoMemoryError(MemoryError):
    """A lack of memory whose message says what was held and what helps."""


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
    except OSError as error:
        message = explain(error)
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
    except OSError as error:
        raise AgreedError(explain(error)) from error


def no_memory(error: BaseException) -> bool:
    """Whether an error says that there is not enough memory, on a GPU or on the host."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None
    )


def _may_be_anothers(error: BaseException) -> bool:
    """Whether a collective failed: that is how a rank sees that another one has gone."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and _COLLECTIVE.search(str(error)) is not None


def _end_alike(message: str, debug: bool) -> None:
    """End with an error that all ranks have, of which rank 0 speaks."""
    try:
        rank, world_size, _ = environment_ranks()
    except TopologyError:  # which one it is nobody knows, and so it speaks
        rank, world_size = 0, 1
    if debug and rank == 0:
        traceback.print_exc()
    if own_lifeline().connected:
        own_lifeline().fail(message, USER_ERROR)
    elif rank == 0:
        print_error(message)
    elif world_size > 1:
        time.sleep(1.0)  # rank 0 speaks before this exit makes the launcher end it


def _end_alone(error: BaseException, status: int, *, show: bool) -> None:
    """End with an error of this rank: the others hear of it, and rank 0 prints it."""
    if show:
        traceback.print_exc()
    lifeline = own_lifeline()
    text = str(error) or type(error).__name__
    if isinstance(error, KeyboardInterrupt):
        text = "interrupted"
    elif isinstance(error, NoMemoryError):
        pass
    elif no_memory(error):
        text = f"out of memory ({text.splitlines()[0]}); use more ranks or a smaller data.tokens"
    elif _may_be_anothers(error):
        text = _SOURCE_LINE.sub("", text)
    elif not isinstance(error, CpflareError):
        text = f"{type(error).__name__}: {text}"
    where = [f"[rank {lifeline.rank}]"] if lifeline.connected else []
    where += [f"{lifeline.place}:"] if lifeline.place else []
    message = " ".join([*where, one_line(text, _LONGEST_MESSAGE)])
    lifeline.fail(message, status, late=_may_be_anothers(error))
