"""What holds for all tests: one thread, seeded draws, GPU tests only on a GPU, workers ended."""

from __future__ import annotations

import pytest
import torch

from support import harness

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_sessionfinish() -> None:
    harness.shut_down()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
