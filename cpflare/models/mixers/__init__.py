"""The mixers, by the name that `model.mixer` gives them."""

from __future__ import annotations

from cpflare.config import ModelConfig
from cpflare.models.mixer import Mixer, NoMixer
from cpflare.models.mixers.flare import FlareMixer
from cpflare.models.mixers.flarepp import FlarePPMixer


def mixer_title(name: str) -> str:
    """What a mixer is called in texts; an unknown one as it is."""
    return {"flare": "FLARE", "flarepp": "FLARE++"}.get(name, name)


def build_mixer(config: ModelConfig) -> Mixer:
    """A mixer with the configuration's sizes and options."""
    if config.mixer == "flare":
        return FlareMixer(config.channels, config.heads, config.latents)
    if config.mixer == "flarepp":
        return FlarePPMixer(
            config.channels,
            config.heads,
            config.latents,
            norm=config.norm,
            query=config.query,
            synthesis=config.synthesis,
            gate_init=config.gate_init,
        )
    assert config.mixer == "none"
    return NoMixer()
