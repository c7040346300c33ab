"""`cpflare mixers`: the figures of every mixer in one configuration."""

from __future__ import annotations

import json

import pytest

from cpflare.cli import mixers
from cpflare.errors import ConfigError
from cpflare.models.mixers import MIXERS

pytestmark = pytest.mark.slow

C, H, M, BLOCKS = 16, 2, 4, 3
SIZES = [f"model.channels={C}", f"model.heads={H}", f"model.latents={M}", f"model.blocks={BLOCKS}"]


@pytest.fixture(scope="module")
def rows():
    listed = [
        mixers.costs(mixers.with_mixer(mixers.load_config(None, SIZES), name), 2) for name in MIXERS
    ]
    return {row["mixer"]: row for row in listed}


def test_it_lists_every_mixer_with_what_the_formulas_say(rows):
    assert list(rows) == list(MIXERS)
    none, flare, full = rows["none"], rows["flare"], rows["full"]
    assert (none["messages"], none["message_bytes"]) == (0, 0)
    assert (flare["messages"], flare["flops_per_token_and_token"]) == (2 * BLOCKS, 0)
    assert flare["message_bytes"] == 4 * BLOCKS * M * (2 * C + H)
    added = flare["flops_per_token"] - none["flops_per_token"]
    assert added == BLOCKS * (6 * C * C + 8 * M * C)
    assert flare["parameters"] - none["parameters"] == BLOCKS * (3 * (C * C + C) + M * C)
    assert full["flops_per_token_and_token"] == BLOCKS * 4 * C
    assert full["flops_per_token"] - none["flops_per_token"] == BLOCKS * 8 * C * C
    assert full["message_bytes"] is None


def test_no_message_but_full_attention_s_grows_with_the_tokens(rows):
    assert [name for name, row in rows.items() if row["message_bytes"] is None] == ["full"]


def test_it_prints_them(rows, capsys, monkeypatch):
    monkeypatch.setattr(mixers, "costs", lambda config, ranks: rows[config.model.mixer])
    mixers.main([*SIZES, "--json"])
    assert json.loads(capsys.readouterr().out) == list(rows.values())
    mixers.main([*SIZES, "model.mixer=abupt", "model.anchors=7"])  # an option of one of them
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(MIXERS)
    assert "grow with N" in next(line for line in lines if line.startswith("full"))


def test_no_ranks_are_refused():
    with pytest.raises(ConfigError, match="--ranks 0 must be at least 1"):
        mixers.main(["--ranks", "0"])
