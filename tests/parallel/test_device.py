"""Which device a rank takes, and what is refused; on GPUs that are told of and not there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from cpflare.errors import ConfigError, TopologyError
from cpflare.lifeline import lifeline
from cpflare.ops import attention
from cpflare.parallel import topology
from cpflare.parallel.device import (
    choose_device,
    claim_gpu,
    has_precision,
    require_precision,
    uses_gpu,
)


@pytest.fixture
def gpus(monkeypatch):
    """Make torch see some GPUs, of a compute capability."""

    def see(count, capability=(9, 0)):
        answers = {
            "is_available": count > 0, "device_count": count, "set_device": None,
            "get_device_capability": capability, "get_device_name": "some GPU",
        }  # fmt: skip
        for name, value in answers.items():
            monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=device.index)
        )

    return see


@pytest.mark.parametrize(
    ("count", "wanted", "device"),
    [(0, "auto", "cpu"), (0, "cpu", "cpu"), (4, "auto", "cuda:1"), (4, "cpu", "cpu"),
     (4, "cuda", "cuda:1"), (1, "auto", "cuda:0")],
)  # fmt: skip
def test_a_rank_takes_the_device_that_is_asked_for(gpus, count, wanted, device):
    gpus(count)
    assert str(choose_device(wanted, 1)) == device
    assert uses_gpu(wanted) == device.startswith("cuda")


@pytest.mark.parametrize("visible", [None, ""])
def test_a_gpu_that_is_not_there_is_refused(gpus, monkeypatch, visible):
    gpus(0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(TopologyError, match=r"parallel.device=cuda.*set parallel.device=cpu") as e:
        choose_device("cuda", 0)
    assert ("CUDA_VISIBLE_DEVICES is ''" in str(e.value)) == (visible is not None)


def test_more_ranks_than_gpus_are_refused_with_both_numbers(gpus, monkeypatch):
    gpus(2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    store = dist.HashStore()
    for rank in range(2):
        claim_gpu(store, rank, choose_device("auto", rank))
        claim_gpu(store, rank, torch.device("cpu"))
    mend = r"3 ranks on .* but 2 GPUs \(ranks 0 and 2 .*--nproc_per_node=2.*parallel.device=cpu"
    with pytest.raises(TopologyError, match=mend):
        claim_gpu(store, 2, choose_device("auto", 2))


@pytest.mark.parametrize(
    ("precision", "capability", "mend"),
    [("bf16", (7, 5), "fp16 or fp32"), ("bf16", (6, 1), "precision=fp32"),
     ("fp16", (6, 1), "precision=fp32"), ("bf16", (8, 0), None), ("fp16", (7, 5), None),
     ("fp32", (3, 5), None)],
)  # fmt: skip
def test_a_precision_that_the_gpu_lacks_is_refused(gpus, precision, capability, mend):
    gpus(1, capability)
    device = torch.device("cuda", 0)
    assert has_precision(precision, torch.device("cpu"))
    assert has_precision(precision, device) == (mend is None)
    if mend is None:
        require_precision(precision, device)
    else:
        with pytest.raises(ConfigError, match=mend):
            require_precision(precision, device)


@pytest.mark.parametrize(("capability", "flash"), [((7, 5), False), ((8, 0), True)])
def test_flash_is_for_the_gpus_that_it_is_built_for(gpus, capability, flash):
    gpus(1, capability)
    attention._has_flash.cache_clear()
    assert attention._has_flash(torch.device("cuda", 0)) == flash
    attention._has_flash.cache_clear()


@pytest.mark.parametrize("timeout_s", [8.0, 60.0, 600.0])
def test_the_collectives_of_a_gpu_give_up_after_the_lifeline_has_spoken(timeout_s):
    limit = topology._collective_timeout(timeout_s, torch.device("cuda", 0)).total_seconds()
    silent_s = 0.75 * timeout_s
    grace_s = min(5.0, silent_s / 15)
    assert lifeline._PATIENCE * silent_s + grace_s < 0.8 * limit
