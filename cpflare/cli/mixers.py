"""`cpflare mixers`: what every mixer costs in a given configuration.

cpflare mixers --config drivaerml_flarepp --ranks 4 model.latents=128
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from cpflare.arguments import Parser
from cpflare.config import Config, ModelConfig, config_from_dict, load_config
from cpflare.errors import ConfigError
from cpflare.models import build_model
from cpflare.models.mixers import MIXERS
from cpflare.plan.counting import CPU_ATTENTION
from cpflare.precision import weight_dtype
from cpflare.scaling.messages import messages_of

_PROBES = (1024, 1025, 1026)
"""Tokens of the forwards whose operations are counted; no fewer than the usual anchors. The counts
are whole numbers, so that neighbours are as good as any."""


def parser() -> Parser:
    """The command line of `cpflare mixers`."""
    parser = Parser(
        prog="cpflare mixers",
        description="Parameters, FLOPs and messages of every mixer in the same configuration.",
        epilog="FLOPs are those of matrix products in a forward, counted on a few tokens.\n"
        "Messages are the reductions of a step of one case, both ways; bytes, a rank's own.",
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="key=value", help="configuration keys")
    add("--config", help="a YAML file or the name of a shipped one (default: the defaults)")
    add("--ranks", type=int, default=2, help="ranks that share a case (default 2)")
    add("--json", action="store_true", help="print all figures as JSON")
    return parser


def main(argv: Sequence[str]) -> None:
    """Print the table."""
    options = parser().parse_args(argv)
    if options.ranks < 1:
        raise ConfigError(f"--ranks {options.ranks} must be at least 1")
    config = load_config(options.config, options.overrides)
    rows = [costs(with_mixer(config, name), options.ranks) for name in MIXERS]
    print(json.dumps(rows, indent=1) if options.json else table(rows))


def with_mixer(config: Config, mixer: str) -> Config:
    """A configuration with another mixer, whose own options are at their defaults."""
    if mixer == config.model.mixer:
        return config
    values = config.to_dict()
    common = {item.name for item in dataclasses.fields(ModelConfig)}
    values["model"] = {k: v for k, v in values["model"].items() if k in common} | {"mixer": mixer}
    return config_from_dict(values)


def costs(config: Config, ranks: int) -> dict[str, Any]:
    """A mixer's figures.

    `flops_per_token` of a forward, and what is added to it for each token of the case; `messages`
    and `message_bytes` of a step's reductions, null where they grow with the tokens.
    """
    model = build_model(config)
    few, some, many = (forward_flops(config, tokens) for tokens in _PROBES)
    squared = (many - 2 * some + few) / 2
    sent = messages_of(config, ranks).stages
    return {
        "mixer": config.model.mixer,
        "title": MIXERS[config.model.mixer].title,
        "parameters": sum(p.numel() for p in model.parameters()),
        "flops_per_token": some - few - squared * (_PROBES[0] + _PROBES[1]),
        "flops_per_token_and_token": squared,
        "messages": len(sent),
        "message_bytes": None if squared else sum(message.num_bytes for message in sent),
    }


def forward_flops(config: Config, tokens: int) -> int:
    """FLOPs of the matrix products in a forward of one rank, which are linear in the blocks."""
    blocks = config.model.blocks
    one, two = (_counted(config, tokens, count) for count in (1, 2))
    return one + (blocks - 1) * (two - one)


def _counted(config: Config, tokens: int, blocks: int) -> int:
    model_config = dataclasses.replace(config.model, blocks=blocks)
    model = build_model(dataclasses.replace(config, model=model_config)).eval()
    inputs = torch.rand(tokens, config.input_channels, dtype=weight_dtype(config.train.precision))
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
        model(inputs)
    return int(counter.get_total_flops())


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The figures side by side."""
    lines = [
        f"{'model.mixer':<14}{'':<18}{'parameters':>12}{'FLOPs a token':>22}"
        f"{'messages':>10}{'bytes a step':>14}"
    ]
    for row in rows:
        flops = f"{row['flops_per_token']:.3g}"
        if row["flops_per_token_and_token"]:
            flops += f" + {row['flops_per_token_and_token']:.3g} N"
        num_bytes = row["message_bytes"]
        lines.append(
            f"{row['mixer']:<14}{row['title']:<18}{row['parameters']:>12,}{flops:>22}"
            f"{row['messages']:>10}{'grow with N' if num_bytes is None else f'{num_bytes:,}':>14}"
        )
    return "\n".join(lines)
