"""The registry of mixers, by the name that `model.mixer` gives them.

Nothing outside this folder knows a mixer by name: what it reduces, sends and costs follows from its
stages. A new one is a file here and a line in `MIXERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cpflare.config import ModelConfig
from cpflare.models.mixer import Mixer
from cpflare.models.mixers.flare import FlareMixer
from cpflare.models.mixers.flarepp import FlarePPMixer
from cpflare.models.mixers.none import NoMixer


@dataclass(frozen=True)
class MixerKind:
    """How a mixer is called on pages and plots, and how it is built from a configuration."""

    title: str
    build: Callable[[ModelConfig], Mixer]


MIXERS: dict[str, MixerKind] = {
    "flare": MixerKind("FLARE", FlareMixer.from_config),
    "flarepp": MixerKind("FLARE++", FlarePPMixer.from_config),
    "none": MixerKind("no mixer", NoMixer.from_config),
}


def build_mixer(config: ModelConfig) -> Mixer:
    """A mixer with the configuration's sizes and options."""
    return MIXERS[config.mixer].build(config)


def mixer_title(name: str) -> str:
    """A mixer's name for people; the name itself where a later version's is unknown."""
    return MIXERS[name].title if name in MIXERS else name
