"""Weights of rivals' public code, where it publishes the class, by a map of their names.

| Transolver's attention on irregular meshes (Physics_Attention) | here |
|---|---|
| temperature [1, H, 1, 1] | temperature [H] |
| in_project_x, in_project_fx, in_project_slice | x_proj, value_proj, slice_proj |
| to_q, to_k, to_v; to_out.0 | slice_attention.query_proj, key_proj, value_proj; out_proj |

| AB-UPT's anchor attention | here |
|---|---|
| qkv; proj | qkv_proj; out_proj |

| LNO, complete | here |
|---|---|
| trunk_projector, branch_projector, attention_projector, out_mlp | in_proj, blocks.0.branch, \
blocks.0.scores, out_proj |
| .input, .hidden.J, .output of these | .fc1, .layers.J, .fc2 |
| attn_blocks.I.ln1, ln2, mlp.0, mlp.2 | blocks.0.latent_blocks.I.norm1, norm2, fc1, fc2 |
| attn_blocks.I.self_attn.Wq, Wk, Wv; proj | .qkv_proj, beneath each other; .out_proj |

The public Transolver on irregular meshes has no clamp: `model.temperature_range=null`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cpflare.errors import DataError
from cpflare.models.backbone import Backbone
from cpflare.models.mixers.abupt import AbuptMixer
from cpflare.models.mixers.transolver import TransolverMixer
from cpflare.models.published import load_renamed

_TRANSOLVER = (
    (r"^in_project_x\.", "x_proj."),
    (r"^in_project_fx\.", "value_proj."),
    (r"^in_project_slice\.", "slice_proj."),
    (r"^to_q\.", "slice_attention.query_proj."),
    (r"^to_k\.", "slice_attention.key_proj."),
    (r"^to_v\.", "slice_attention.value_proj."),
    (r"^to_out\.0\.", "out_proj."),
)
_ANCHORS = ((r"^qkv\.", "qkv_proj."), (r"^proj\.", "out_proj."))
_LNO = (
    (r"^trunk_projector\.", "in_proj."),
    (r"^branch_projector\.", "blocks.0.branch."),
    (r"^attention_projector\.", "blocks.0.scores."),
    (r"^out_mlp\.", "out_proj."),
    (r"\.input\.", ".fc1."),
    (r"\.hidden\.", ".layers."),
    (r"\.output\.", ".fc2."),
    (r"^attn_blocks\.", "blocks.0.latent_blocks."),
    (r"\.ln([12])\.", r".norm\1."),
    (r"\.mlp\.0\.", ".fc1."),
    (r"\.mlp\.2\.", ".fc2."),
    (r"\.self_attn\.proj\.", ".out_proj."),
)
_QUERY = re.compile(r"^(attn_blocks\.\d+)\.self_attn\.W([qkv])\.(weight|bias)$")


def load_transolver(mixer: TransolverMixer, state: Mapping[str, Tensor]) -> None:
    """Load the state dict of a published Physics_Attention for irregular meshes.

    Raises:
        DataError: a weight is missing, left over (as grids' convolutions are), or of another shape.
    """
    converted = _renamed(state, _TRANSOLVER)
    if "temperature" in converted:
        converted["temperature"] = converted["temperature"].flatten()
    load_renamed(mixer, converted, "compare model.channels, heads and latents")


def load_anchor_attention(mixer: AbuptMixer, state: Mapping[str, Tensor]) -> None:
    """Load the state dict of a published anchor attention with one projection `qkv`.

    Raises:
        DataError: it has `q`, `k` and `v` apart, as later versions do, which also normalise queries
            and keys: another function; or a weight does not fit.
    """
    if "q.weight" in state:
        raise DataError(
            "this anchor attention has q, k and v apart, and normalises queries and keys: another "
            "function than model.mixer=abupt; load one of an earlier version, with qkv"
        )
    load_renamed(mixer, _renamed(state, _ANCHORS), "compare model.channels")


def load_lno(model: Backbone, state: Mapping[str, Tensor]) -> None:
    """Load the state dict of a published LNO (shared scores) into a model of the same sizes.

    Raises:
        DataError: a weight is missing, left over, or of another shape.
    """
    state = {name.removeprefix("module."): value for name, value in state.items()}
    merged = {name: value for name, value in state.items() if not _QUERY.match(name)}
    parts = {m.groups(): state[name] for name in state if (m := _QUERY.match(name))}
    for block, _, kind in [key for key in parts if key[1] == "q"]:
        found = [parts.get((block, letter, kind)) for letter in "qkv"]
        if all(part is not None for part in found):
            merged[f"{block}.qkv_proj.{kind}"] = torch.cat([p for p in found if p is not None])
    hint = "compare model.mixer=lno, model.blocks, latents and lno_layers"
    load_renamed(model, _renamed(merged, _LNO), hint)


def _renamed(state: Mapping[str, Tensor], rules: Sequence[tuple[str, str]]) -> dict[str, Tensor]:
    out = {}
    for name, value in state.items():
        renamed = name.removeprefix("module.")
        for pattern, replacement in rules:
            renamed = re.sub(pattern, replacement, renamed)
        out[renamed] = value
    return out
