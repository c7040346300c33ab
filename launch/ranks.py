"""Starts a launcher's module on several ranks of this machine, as torchrun does, from `cpflare`."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence

from cpflare.parallel.runtime import STOPPED, USER_ERROR


def run_on_ranks(module: str, arguments: Sequence[str], num_ranks: int) -> int:
    """Run `python -m module arguments` on `num_ranks` ranks; returns the exit status.

    The ranks' own messages say what went wrong, so torchrun's report is left out. A rank that ends
    with a user's error (2) makes the whole end with it; a run that a signal stopped ends with 75.
    The rendezvous takes a free port.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # Without a setting torchrun takes one thread a rank, and prints a notice about it.
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // num_ranks, 1)))
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    options = ["--standalone", f"--nproc_per_node={num_ranks}", "-m", module, *arguments]
    # torchrun forwards SIGTERM to its ranks, but would die of SIGUSR1 and leave them behind.
    signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    try:
        run(parse_args(options))
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        return next((code for code in (USER_ERROR, STOPPED) if code in codes), max(1, *codes))
    except SignalException as error:
        number = error.sigval
        if number == signal.SIGTERM:
            return STOPPED
        print(f"error: ended by {number.name}", file=sys.stderr)
        return 128 + int(number)
    return 0
