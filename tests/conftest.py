"""What holds for all tests: one thread, seeded draws, GPU tests only on a GPU, workers ended."""

from __future__ import annotations

import os
import zlib
from collections.abc import Generator

import pytest
import torch

from support import harness
from support.alone import Turns

torch.set_num_threads(1)
if torch.cuda.is_available():
    # Tests of ranks are of the CPU's: two on one GPU are refused. Processes see none from here on.
    torch.cuda.init()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

_TURNS = pytest.StashKey[Turns]()


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "leave out slow tests, and all but one parameter set of every other one"
    parser.addoption("--fast", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist
        config.stash[_TURNS] = Turns(config.workerinput["testrunuid"])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("fast"):
        _select_fast(config, items)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _select_fast(config: pytest.Config, items: list[pytest.Item]) -> None:
    # The lowest checksum: as good as random, so that the values of a parameter are met over the
    # whole suite, and the same in every run.
    chosen = {
        item.nodeid.partition("[")[0]: item
        for item in sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode()), reverse=True)
        if item.get_closest_marker("slow") is None
    }
    kept = set(chosen.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    turns = item.config.stash.get(_TURNS, None)
    if turns is None:
        return (yield)
    with turns.take(item.get_closest_marker("alone") is not None):
        return (yield)


def pytest_sessionfinish(session: pytest.Session) -> None:
    harness.shut_down()
    if _TURNS in session.config.stash:
        session.config.stash[_TURNS].close()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
