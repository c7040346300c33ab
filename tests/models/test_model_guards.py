"""The models' comparison must fail where their exactness is broken on purpose."""

from __future__ import annotations

import functools

import pytest

from support.breaks import BREAKS, CLEAR, broken_by
from support.exact_models import FLAREPP, VARIANTS, compare, run_shard


def model_broken(name, rank, world_size, *args):
    with broken_by(name):
        return run_shard(rank, world_size, *args)


@pytest.mark.parametrize("variant", ["flare-layernorm", "flarepp-layernorm-gated-shared"])
@pytest.mark.parametrize("name", [name for name in BREAKS if name != "none"])
def test_the_model_s_comparison_sees(name, variant):
    found = compare(VARIANTS[variant], [4, 3], 7, functools.partial(model_broken, name))
    if name == "averaged outputs":
        assert found["loss"] > 1e-4
    else:
        assert found["loss"] < 1e-10  # only the gradients are broken, as in a run that trains on
    assert found["inputs"] > CLEAR
    keys = [key for key in found if key.endswith(("key_proj.weight", "value_proj.weight"))]
    assert len(keys) == 4
    assert max(found[key] for key in keys) > CLEAR
    assert found["in_proj.fc1.weight"] > CLEAR


def test_the_model_s_comparison_passes_where_nothing_is_broken():
    found = compare(FLAREPP, [4, 3], 7, functools.partial(model_broken, "none"))
    assert max(found.values()) < 1e-10
