"""The comparison of every mixer with its formula must fail where exactness is broken on purpose."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest

from cpflare.engine.streamed import Sweep
from cpflare.models import stages
from cpflare.models.mixers import MIXERS, transolverpp
from cpflare.models.mixers.gnot import NormalisedAttention
from cpflare.models.site import Site
from support.breaks import CLEAR, broken_by
from support.every_mixer import EXACT, draw, errors_of, joined, naive_values, shard_values
from support.harness import run_ranks


def summed_nowhere(rank, world_size, *case):
    with broken_by("dZ not reduced"):
        return shard_values(rank, world_size, *case)


@pytest.mark.parametrize("mixer", [name for name in MIXERS if name != "none"])
def test_state_gradients_that_stay_partial_are_seen(mixer):
    case = draw(mixer, 11)
    expected = naive_values(mixer, *case)
    results = run_ranks(2, summed_nowhere, mixer, [2, 9], *case)
    for engine in results[0]:
        errors = errors_of(joined([result[engine] for result in results]), expected)
        assert errors["outputs"] < EXACT  # only the gradients are broken
        assert errors["inputs"] > CLEAR, engine


def leave_inputs_out(patch):
    """Tokens read the raw inputs without their gradient."""

    @contextmanager
    def reading(self, rows, site):
        yield site

    patch.setattr(Sweep, "_reading", reading)


def take_first_rows(patch):
    """A chunk's rows are taken from the start of the shard."""
    part = Site.part

    def broken(self, chunk):
        found = part(self, chunk)
        return replace(found, rows=self.rows[: len(found.rows)])

    patch.setattr(Site, "part", broken)


def forget_the_offset(patch):
    """A chunk takes its place from the start of the shard."""
    part = Site.part
    patch.setattr(Site, "part", lambda self, chunk: replace(part(self, chunk), offset=0))


def double_eps(patch):
    """The mean's eps is added on each of two ranks."""
    mean_of = stages.mean_of
    patch.setattr(stages, "mean_of", lambda *a, eps: mean_of(*a, eps=2 * eps))


def draw_by_chunk(patch):
    """Noise is drawn anew whenever a chunk is computed."""
    calls = iter(range(10**6))
    uniform = transolverpp.token_uniform
    patch.setattr(
        transolverpp,
        "token_uniform",
        lambda rows, m, **key: uniform(rows, m, **key | {"seed": next(calls)}),
    )


def restart_rows(patch):
    """Every chunk's gathered rows get the first chunk's gradient."""
    chunk = stages.GatherAdjoint.chunk

    def broken(self, tokens):
        pull = chunk(self, tokens)
        self.start = 0
        return pull

    patch.setattr(stages.GatherAdjoint, "chunk", broken)


def drop_the_query(patch):
    """Normalised attention without the `+ q` of the public codes."""
    read = NormalisedAttention.read

    def broken(self, q, sums):
        return read(self, q, sums) - self.out_proj(q.transpose(1, 2).flatten(-2))

    patch.setattr(NormalisedAttention, "read", broken)


BREAKS = [
    (leave_inputs_out, "lno", CLEAR),
    (leave_inputs_out, "gnot", CLEAR),
    (leave_inputs_out, "abupt", CLEAR),
    (take_first_rows, "transolverpp", CLEAR),
    (draw_by_chunk, "transolverpp", CLEAR),
    (forget_the_offset, "abupt-few", CLEAR),
    (double_eps, "transolver", 100 * EXACT),
    (double_eps, "cano", 100 * EXACT),
    (restart_rows, "full", CLEAR),
    (drop_the_query, "gnot", CLEAR),
]


@pytest.mark.parametrize(("broken", "variant", "least"), BREAKS)
def test_what_is_broken_in_one_process_is_seen(broken, variant, least, monkeypatch):
    case = draw(variant, 11)
    expected = naive_values(variant, *case)
    broken(monkeypatch)
    found = shard_values(0, 1, variant, [11], *case)["streamed"]
    assert max(errors_of(found, expected).values()) > least
