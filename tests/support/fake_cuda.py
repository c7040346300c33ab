"""Runs functions on a GPU that is not there, in a process of their own.

`support.fake_cuda_device` says what such a GPU is. It takes a C++ compiler, once for each version
of torch.
"""

from __future__ import annotations

import atexit
import hashlib
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sysconfig
import tempfile
import traceback
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_SOURCE = Path(__file__).with_suffix(".cpp")
_ANSWER_S = 120.0


class NoFakeCuda(Exception):
    """Why there is no fake GPU here."""


@cache
def build() -> Path:
    """The compiled guard, from the cache of this user where it is there.

    Raises:
        NoFakeCuda: no compiler, or it failed.
    """
    key = f"{version('torch')}-{sysconfig.get_platform()}".encode() + _SOURCE.read_bytes()
    folder = Path(tempfile.gettempdir()) / f"cpflare-fake-cuda-{os.getuid()}"
    target = folder / f"{hashlib.sha256(key).hexdigest()[:16]}.so"
    if target.exists():
        return target
    compiler, torch = os.environ.get("CXX", "g++"), find_spec("torch")
    if shutil.which(compiler) is None or torch is None:
        raise NoFakeCuda(f"needs the C++ compiler {compiler}")
    home = Path(str(torch.origin)).parent
    folder.mkdir(mode=0o700, exist_ok=True)
    aside = target.with_suffix(f".{os.getpid()}")
    flags = ["-O0", "-shared", "-fPIC", "-std=c++20", f"-I{home}/include", f"-L{home}/lib"]
    command = [compiler, *flags, str(_SOURCE), "-o", str(aside), "-lc10", "-ltorch_cpu"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise NoFakeCuda(f"{compiler} cannot build {_SOURCE.name}: {done.stderr[:300]}")
    aside.rename(target)
    return target


def on_fake_gpu(
    fn: Callable[..., Any], *args: Any, rank: int = 0, world_size: int = 1, timeout_s: float = 0.0
) -> Any:
    """fn(gpu, *args) as one rank of several, under a fresh `FakeGPU`; returns its value.

    `fn` is a function at the top level of its module, which it may not leave patched.

    Raises:
        AssertionError: it raised or ended; the message has its traceback.
        NoFakeCuda: there is none here.
    """
    worker = _worker()
    worker.send_bytes(pickle.dumps((fn, args, rank, world_size)))
    if not worker.poll(timeout_s or _ANSWER_S):
        _worker.cache_clear()
        raise AssertionError(f"{fn.__name__}: no answer in {timeout_s or _ANSWER_S:.0f} s")
    try:
        succeeded, answer = pickle.loads(worker.recv_bytes())
    except EOFError:
        _worker.cache_clear()
        raise AssertionError(f"{fn.__name__}: the process ended") from None
    assert succeeded, answer
    return answer


@cache
def _worker() -> Connection:
    """A process with the fake device, kept over the calls: importing torch takes seconds."""
    os.environ["FAKE_CUDA_LIBRARY"] = str(build())
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    atexit.register(process.kill)
    return ours


def _serve(connection: Connection) -> None:
    from support import fake_cuda_device as device

    device.torch.set_num_threads(1)
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        try:
            fn, args, rank, world_size = pickle.loads(message)
            if world_size > 1:
                device.start_group(rank, world_size)
            try:
                with device.FakeGPU() as gpu:
                    answer = fn(gpu, *args)
            finally:
                if world_size > 1:
                    device.dist.destroy_process_group()
            packed = pickle.dumps((True, answer))
        except Exception:
            lines = traceback.format_exc().splitlines()
            # Where an operator has no kernel, torch names each that it has.
            packed = pickle.dumps((False, "\n".join(t for t in lines if "registered at" not in t)))
        connection.send_bytes(packed)
