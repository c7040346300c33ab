"""What starts the ranks of this host, and the end of a rank that has lost it.

A killed torchrun leaves its ranks to whoever adopts them. Each rank therefore looks once a second
whether it is there still. PR_SET_PDEATHSIG would not do: it also tells of the end of a thread,
nothing of a launcher that was gone before, and nothing where a script stands between the two.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

_RUN_ID = "TORCHELASTIC_RUN_ID"
"""torchrun sets it, whose ranks are its own; ranks started by hand stay when their shell ends."""

_LOOK_S = 1.0
_STEP_S = 10.0
"""How long a step under way may take to end. A rank is gone 15 s after its launcher."""

_PROC = Path("/proc")


@dataclass(frozen=True)
class Launcher:
    """A process; its number alone may be another's one day. `began` is "" if it was gone before."""

    pid: int
    began: str

    def alive(self) -> bool:
        """Whether it runs; one that has ended and is not yet waited for does not."""
        if not (_PROC / "self/stat").exists():
            return os.getppid() == self.pid
        state, _, began = _stat(self.pid)
        return bool(self.began) and began == self.began and state not in "ZX"


def own_launcher() -> Launcher | None:
    """torchrun's process, or that of `cpflare`; None for a rank that nothing looks after.

    It is the nearest ancestor that has not torchrun's variables itself, as scripts in between have.
    """
    if _RUN_ID not in os.environ:
        return None
    pid = os.getppid()
    if not (_PROC / "self/stat").exists():
        return Launcher(pid, "")
    names = (_RUN_ID, "RANK", "MASTER_PORT")
    own = {f"{name}={os.environ[name]}".encode() for name in names if name in os.environ}
    while pid and own <= set(_read(pid, "environ").split(b"\0")):
        pid = _stat(pid)[1]
    if not pid:  # outside this container
        return None
    began = _stat(pid)[2]
    return Launcher(pid, "" if _has_adopted(pid) else began)


def watch_launcher(abandon: Callable[[str], NoReturn]) -> None:
    """Let this process end soon after its launcher: as after SIGTERM, or else by `abandon(why)`."""
    launcher = own_launcher()
    if launcher is not None:
        arguments = (launcher, abandon)
        threading.Thread(target=_watch, args=arguments, name="launcher", daemon=True).start()


def _watch(launcher: Launcher, abandon: Callable[[str], NoReturn]) -> None:
    while launcher.alive():
        time.sleep(_LOOK_S)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        with suppress(OSError):  # its standard error may be gone as well
            sys.stderr.write(f"notice: what started this rank (process {launcher.pid}) is gone\n")
    else:
        time.sleep(_LOOK_S)  # the first one tells before the others' request ends it
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_STEP_S)
    abandon(
        f"what started it (process {launcher.pid}) is gone, and it came to no end of its own in "
        f"{_STEP_S:.0f} s; start it again (where it is no torchrun's rank, unset {_RUN_ID} first)"
    )


def _has_adopted(pid: int) -> bool:
    """Whether a parent only took this rank over, as init does: torchrun has PyTorch loaded."""
    try:
        if (_PROC / str(pid)).stat().st_uid != (_PROC / "self").stat().st_uid:
            return True
        return b"libtorch" not in (_PROC / str(pid) / "maps").read_bytes()
    except FileNotFoundError:  # it has just ended
        return True
    except PermissionError:  # a container's rules, or an init with rights of its own
        return b"python" not in _read(pid, "cmdline")


def _stat(pid: int) -> tuple[str, int, str]:
    """(state, parent, when it began) of a process; ("X", 0, "") if it is gone."""
    fields = _read(pid, "stat").decode(errors="replace").rpartition(")")[2].split()
    return (fields[0], int(fields[1]), fields[19]) if fields else ("X", 0, "")


def _read(pid: int, name: str) -> bytes:
    try:
        return (_PROC / str(pid) / name).read_bytes()
    except OSError:  # it is gone, or another user's
        return b""
