"""Stopping on a signal: what any rank is asked for, all ranks learn from one sum over them.

A training step carries the ranks' votes in the all-reduce of its gradients. Evaluations and
predictions have no such sum and take a small one before their cases. All ranks read the same sum,
so none stops earlier than another and there is nothing to agree on beside the collectives. A signal
that comes after a rank has cast its votes counts in the next sum: all stop at most one step or case
later, as they would by any agreement that does not interrupt a step.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from cpflare.parallel.comm import Communicator, to_host

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """What signals ask of this process; its `votes` are 1 for each of `STOP_SIGNALS` that came."""

    def __init__(self) -> None:
        self.votes = [0.0] * len(STOP_SIGNALS)

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Let SIGTERM and SIGUSR1 ask for a stop while inside."""

        def ask(number: int, _: object) -> None:
            self.votes[STOP_SIGNALS.index(signal.Signals(number))] = 1.0

        before = {number: signal.signal(number, ask) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def agree(self, comm: Communicator, device: torch.device) -> str | None:
        """The signal on which all ranks shall stop here, or None; the same on all.

        Communication: one all-reduce of two values.
        """
        return stop_reason(
            to_host(comm.all_reduce(torch.tensor(self.votes, device=device))).tolist()
        )


def stop_reason(votes: Sequence[float]) -> str | None:
    """The name of the first signal that any rank has received, from the ranks' summed votes."""
    asked = (number.name for number, vote in zip(STOP_SIGNALS, votes, strict=True) if vote)
    return next(asked, None)


_own = StopRequest()


def own_stop_request() -> StopRequest:
    """This process's request. Signals come to a process, so there is one."""
    return _own
