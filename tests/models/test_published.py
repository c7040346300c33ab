"""Published weights: the map of their names reproduces a plain model's outputs, or says why not."""

from __future__ import annotations

import pytest
import torch

from cpflare.errors import DataError
from cpflare.models.published import load_published
from support.exact_models import FLAREPP, HEADS, VARIANTS, build, draw, plain
from support.harness import relative_error


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("fp64", 1e-12)])
def test_published_weights_reproduce_the_published_outputs(precision, tolerance, variant):
    dtype = torch.float64 if precision == "fp64" else torch.float32
    published = plain(VARIANTS[variant], dtype)
    model = build(VARIANTS[variant], precision)
    inputs = draw(50)[0].to(dtype)
    before = model(inputs)
    load_published(model, published.state_dict())
    expected = published(inputs).detach()
    assert relative_error(model(inputs), expected) < tolerance
    assert relative_error(before, expected) > 0.1
    wrapped = {f"module.{name}": value for name, value in published.state_dict().items()}
    again = build(VARIANTS[variant], precision)
    load_published(again, wrapped)  # as DistributedDataParallel names them
    assert torch.equal(again(inputs), model(inputs))


def test_published_weights_leave_the_given_state_dict_alone():
    state = plain(VARIANTS["flare-layernorm"]).state_dict()
    copy = {name: value.clone() for name, value in state.items()}
    load_published(build(VARIANTS["flare-layernorm"]), state)
    assert state.keys() == copy.keys()
    assert all(torch.equal(state[name], copy[name]) for name in copy)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda s: s.pop("blocks.1.mixer.k0_proj.weight"), r"missing.*blocks\.1\.mixer"),
        (lambda s: s.update({"blocks.0.mixer.extra": torch.ones(1)}), r"left over.*mixer\.extra"),
        (
            lambda s: s.update({"blocks.0.mixer.latent_q0": torch.zeros(HEADS, 9, 4)}),
            r"\[3, 9, 4\].*\[3, 4, 4\]",
        ),
        (lambda s: s.update({"in_proj.fc1.bias": torch.zeros(5)}), r"in_proj\.fc1\.bias.*\[5\]"),
    ],
    ids=["missing", "left over", "latents", "shape"],
)
def test_published_weights_that_do_not_fit_are_named(change, match):
    state = plain(FLAREPP).state_dict()
    change(state)
    model = build(FLAREPP)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(DataError, match=match) as caught:
        load_published(model, state)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("other", ["flare-layernorm", "flarepp-rmsnorm-gated-shared",
                                   "flarepp-layernorm-gated-separate",
                                   "flarepp-layernorm-pure-shared"])  # fmt: skip
def test_published_weights_of_another_option_are_refused(other):
    with pytest.raises(DataError, match="model"):
        load_published(build(FLAREPP), plain(VARIANTS[other]).state_dict())
