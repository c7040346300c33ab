"""Weights of the published FLARE and FLARE++ code, loaded by a documented map of their names.

| published | here |
|---|---|
| in_proj.fc1, .fcs.J, .fc2 | in_proj.fc1, .layers.J, .fc2 |
| out_proj.0 | out_norm |
| out_proj.1.fc1, .fcs.J, .fc2 | out_proj.fc1, .layers.J, .fc2 |
| blocks.I.norm1, norm2, ffn.fc1, ffn.fc2 | the same |
| blocks.I.mixer.latent_q0 | blocks.I.mixer.seed_queries (FLARE++) |
| blocks.I.mixer.latent_q_fixed | blocks.I.mixer.reference_queries (FLARE++) |
| blocks.I.mixer.gate_logit | blocks.I.mixer.gate_logits (FLARE++) |
| blocks.I.mixer.q0_norm, k_norm | blocks.I.mixer.seed_norm, key_norm (FLARE++) |
| blocks.I.mixer.k0_proj, v0_proj | .synthesis_proj, .synthesis_value_proj (FLARE++) |
| blocks.I.mixer.latent_q | blocks.I.mixer.queries (FLARE) |
| blocks.I.mixer.k_proj, v_proj, out_proj | blocks.I.mixer.key_proj, value_proj, out_proj |
| blocks.I.mixer.k_proj.fc (x + Linear(x)) | blocks.I.mixer.key_proj, with the identity added |

Their options and ours: `rmsnorm` is `model.norm=rmsnorm`, `share_k0_v0=false` is
`model.synthesis=separate`; `k_norm`, `q_fixed_norm` and `out_proj_norm` must be on and
`num_layers_ffn` 0, as in every published full-surface setting.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from cpflare.errors import DataError
from cpflare.models.backbone import Backbone

_RULES: tuple[tuple[str, str], ...] = (
    (r"^out_proj\.0\.", "out_norm."),
    (r"^out_proj\.1\.", "out_proj."),
    (r"^(in_proj|out_proj)\.fcs\.", r"\1.layers."),
    (r"\.mixer\.latent_q0$", ".mixer.seed_queries"),
    (r"\.mixer\.latent_q_fixed$", ".mixer.reference_queries"),
    (r"\.mixer\.latent_q$", ".mixer.queries"),
    (r"\.mixer\.gate_logit$", ".mixer.gate_logits"),
    (r"\.mixer\.q0_norm\.", ".mixer.seed_norm."),
    (r"\.mixer\.k_norm\.", ".mixer.key_norm."),
    (r"\.mixer\.k0_proj\.", ".mixer.synthesis_proj."),
    (r"\.mixer\.v0_proj\.", ".mixer.synthesis_value_proj."),
    (r"\.mixer\.k_proj\.(fc\.)?", ".mixer.key_proj."),
    (r"\.mixer\.v_proj\.(fc\.)?", ".mixer.value_proj."),
)

_RESIDUAL = re.compile(r"\.mixer\.[kv]0?_proj\.fc\.weight$")


def convert_published(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename a published state dict to this package's names; values are kept.

    A projection published as `x + Linear(x)` becomes one Linear with the identity added.
    """
    converted = {}
    for name, value in state.items():
        renamed = name.removeprefix("module.")
        for pattern, replacement in _RULES:
            renamed = re.sub(pattern, replacement, renamed)
        if _RESIDUAL.search(name):
            value = value + torch.eye(value.shape[0], dtype=value.dtype, device=value.device)
        converted[renamed] = value
    return converted


def load_published(model: Backbone, state: Mapping[str, Tensor]) -> None:
    """Load a published FLARE or FLARE++ state dict into a model of the same sizes.

    Raises:
        DataError: a weight is missing, left over or of another shape; it is named, with the option
            of this package that would fit where there is one.
    """
    hint = (
        "compare model.mixer, model.blocks, model.norm (rmsnorm has no norm biases) and "
        "model.synthesis"
    )
    load_renamed(model, convert_published(state), hint)


def load_renamed(model: nn.Module, converted: Mapping[str, Tensor], hint: str) -> None:
    """Load a state dict that has this package's names; all of it, or nothing.

    Raises:
        DataError: a weight is missing, left over or of another shape; `hint` says what to compare.
    """
    own = model.state_dict()
    missing, unexpected = sorted(own.keys() - converted), sorted(converted.keys() - own.keys())
    if missing or unexpected:
        named = [f"missing {name}" for name in missing] + [f"left over {n}" for n in unexpected]
        raise DataError(
            f"published weights do not fit the model: {', '.join(named[:4])}"
            f"{f' and {len(named) - 4} more' if len(named) > 4 else ''}; {hint}"
        )
    for name, value in converted.items():
        if value.shape != own[name].shape:
            raise DataError(
                f"published weight {name} has shape {list(value.shape)}, the model wants "
                f"{list(own[name].shape)}; compare model.channels, heads, latents and ffn_ratio"
            )
    model.load_state_dict(dict(converted))
