"""A step that does not fit: what was held, and what would fit, from the plan's own figures."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from cpflare.config import config_from_dict
from cpflare.data.sampler import Window
from cpflare.parallel.runtime import no_memory
from cpflare.plan.devices import find_device, find_link
from cpflare.plan.memory import memory_mend
from cpflare.plan.planner import Planner, make_planner
from cpflare.train.memory import StepTooLarge, telling_size

CELLS = 4_000_000


def config_of(**engine):
    model = {"channels": 32, "heads": 4, "blocks": 2, "latents": 16}
    return config_from_dict({"model": model, "engine": engine})


def planner_of(config, total) -> Planner:
    device = dataclasses.replace(find_device("h100"), memory_bytes=total)
    return make_planner(config, device, find_link("infiniband"))


@pytest.mark.slow
@pytest.mark.parametrize("engine", [{}, {"executor": "streamed", "chunk_tokens": 2_000_000}])
def test_what_is_advised_fits(engine):
    config = config_of(**engine)
    needed = planner_of(config, 1e12).predict(CELLS, 1).memory_bytes
    total = 0.8 * needed
    text = memory_mend(config, CELLS, 1, total)
    assert f"{needed / 2**30:.3g} GiB are estimated" in text
    planner = planner_of(config, total)
    assert not planner.fits(planner.predict(CELLS, 1))
    ranks = int(re.search(r"(\d+) ranks a case", text).group(1))
    assert planner.fits(planner.predict(CELLS, ranks))
    tokens = int(re.search(r"data.tokens=(\d+)", text).group(1))
    assert planner.fits(planner.predict(tokens, 1))
    if engine:
        chunk = int(re.search(r"engine.chunk_tokens=(\d+)", text).group(1))
        assert planner.fits(planner.predict(CELLS, 1, chunk))
    else:
        assert "engine.executor=streamed (" in text


def test_where_nothing_helps_the_estimate_is_told():
    assert "a smaller model" in memory_mend(config_of(), CELLS, 1, 1e6)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. More"), MemoryError()]
)
def test_a_step_without_memory_tells_its_size(error):
    windows = [Window("a", 0, 50, 50), Window("b", 0, 4_000, 4_000)]
    with pytest.raises(StepTooLarge) as caught, telling_size(windows, torch.device("cpu")):
        raise error
    assert no_memory(caught.value)
    assert caught.value.cells == 4_000
    assert re.search(
        r"this rank held [\d.e+]+ of [\d.e+]+ GiB, with cases of 4,000", str(caught.value)
    )


def test_other_errors_pass():
    with pytest.raises(KeyError), telling_size([], torch.device("cpu")):
        raise KeyError("x")
