"""The registry of mixers, by the name that `model.mixer` gives them.

Nothing outside this folder knows a mixer by name: what it reduces, sends and costs follows from its
stages. A new one is a file here and a line in `MIXERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from cpflare.config import ModelConfig
from cpflare.models import naive
from cpflare.models.mixer import Mixer
from cpflare.models.mixers.abupt import AbuptConfig, AbuptMixer
from cpflare.models.mixers.cano import CanoConfig, CanoMixer
from cpflare.models.mixers.flare import FlareMixer
from cpflare.models.mixers.flarepp import FlarePPConfig, FlarePPMixer
from cpflare.models.mixers.full import FullConfig, FullMixer
from cpflare.models.mixers.galerkin import GalerkinConfig, GalerkinMixer
from cpflare.models.mixers.gnot import GnotConfig, gnot_parts
from cpflare.models.mixers.isab import IsabConfig, IsabMixer
from cpflare.models.mixers.lno import LnoConfig, lno_parts
from cpflare.models.mixers.none import NoMixer
from cpflare.models.mixers.perceiver import PerceiverConfig, perceiver_parts
from cpflare.models.mixers.transolver import (
    Transolver3Config,
    TransolverConfig,
    TransolverMixer,
)
from cpflare.models.mixers.transolverpp import TransolverPPConfig, TransolverPPMixer
from cpflare.models.parts import Parts, backbone_parts


@dataclass(frozen=True)
class MixerKind:
    """How a mixer is called on pages and plots, and how it is built from a configuration.

    `config` is the section with its own options; `naive` is its formula over all tokens of a case,
    for the tests: (mixer, x [B, N, C], site) -> [B, N, C]. A complete architecture has no `build`
    but `parts`, the whole model's, from (config, input channels, output channels), and its naive
    form takes a step in place of the mixer.
    """

    title: str
    build: Callable[[Any], Mixer] | None
    config: type[ModelConfig] = ModelConfig
    naive: Callable[[Any, Tensor, Any], Tensor] | None = None
    parts: Callable[[Any, int, int], Parts] | None = None


MIXERS: dict[str, MixerKind] = {
    "flare": MixerKind("FLARE", FlareMixer.from_config, naive=naive.flare),
    "flarepp": MixerKind("FLARE++", FlarePPMixer.from_config, FlarePPConfig, naive.flarepp),
    "transolver": MixerKind(
        "Transolver", TransolverMixer.from_config, TransolverConfig, naive.transolver
    ),
    "transolverpp": MixerKind(
        "Transolver++", TransolverPPMixer.from_config, TransolverPPConfig, naive.transolverpp
    ),
    "transolver3": MixerKind(
        "Transolver-3", TransolverMixer.from_config, Transolver3Config, naive.transolver
    ),
    "galerkin": MixerKind("Galerkin", GalerkinMixer.from_config, GalerkinConfig, naive.galerkin),
    "cano": MixerKind("CANO", CanoMixer.from_config, CanoConfig, naive.cano),
    "isab": MixerKind("Set Transformer", IsabMixer.from_config, IsabConfig, naive.isab),
    "abupt": MixerKind("AB-UPT", AbuptMixer.from_config, AbuptConfig, naive.abupt),
    "full": MixerKind("full attention", FullMixer.from_config, FullConfig, naive.full),
    "perceiver": MixerKind("Perceiver IO", None, PerceiverConfig, naive.perceiver, perceiver_parts),
    "lno": MixerKind("LNO", None, LnoConfig, naive.lno, lno_parts),
    "gnot": MixerKind("GNOT", None, GnotConfig, naive.gnot, gnot_parts),
    "none": MixerKind("no mixer", NoMixer.from_config, naive=naive.none),
}


def build_parts(config: ModelConfig, in_channels: int, out_channels: int) -> Parts:
    """The modules of a model with the configuration's sizes, mixer and options."""
    kind = MIXERS[config.mixer]
    if not isinstance(config, kind.config):  # the mixer's options at their defaults
        config = kind.config(**asdict(config))
    if kind.parts is not None:
        return kind.parts(config, in_channels, out_channels)
    assert kind.build is not None
    mixers = (kind.build(config) for _ in range(config.blocks))
    return backbone_parts(config, in_channels, out_channels, mixers)


def mixer_title(name: str) -> str:
    """A mixer's name for people; the name itself where a later version's is unknown."""
    return MIXERS[name].title if name in MIXERS else name
