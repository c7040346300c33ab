"""Conditions that stay while a model runs again and again, as in a rollout: encoded once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cpflare.models.backbone import Backbone
from cpflare.models.conditioning import Kept


@contextmanager
def same_conditions(model: Backbone) -> Iterator[None]:
    """All forwards inside are of the same tokens with the same conditions, without gradients.

    What a model makes of its conditions, token by token and for all of them, is kept from the first
    forward on; the outputs are those without it, bit for bit. Weights must not change meanwhile.

    Raises, in a forward:
        ValueError: it has other tokens.
        RuntimeError: gradients are on.
    """
    if model.conditioning is None:
        yield
        return
    model.conditioning.kept = Kept()
    try:
        yield
    finally:
        model.conditioning.kept = None
