"""Compiling the token-local parts of a model; what lets tokens meet stays as it is.

A part is compiled for a chunk and not for a shard, so that both executors use the same code and
many chunks do not make a long program. A whole block compiles too, as one graph, with
`torch.compile(block, fullgraph=True)`: its encoder and decoder are registered operators.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cpflare.errors import ConfigError
from cpflare.models import Backbone
from cpflare.models.backbone import Block, Site
from cpflare.models.mixer import State, Tokens


def compile_local(model: Backbone) -> Backbone:
    """Compile a model's token-local parts; returns the same model.

    They are compiled when they first run, for any number of tokens. Dropout, and chunks of one
    token or none, for which the compiler would make programs of their own, run eagerly.

    Raises:
        ConfigError: the compiler is missing that this takes: of C++ on a CPU, of C on a GPU.
    """
    if next(model.parameters()).device.type == "cpu":
        kind, variable = "C++", "CXX"
        known: tuple[str, ...] = ("g++",)
    else:  # Triton's programs are started by a piece of C, which it compiles
        kind, variable, known = "C", "CC", ("cc", "gcc", "clang")
    wanted = (os.environ[variable],) if os.environ.get(variable) else known
    if not any(shutil.which(compiler) for compiler in wanted):
        raise ConfigError(
            f"engine.compile=true needs the {kind} compiler {' or '.join(wanted)}, which is not on "
            f"PATH; install it, name another one in the variable {variable}, or set "
            "engine.compile=false"
        )
    model.__class__ = CompiledBackbone
    for step in model.steps:
        if type(step) is Block:  # conditioned blocks read their site, and run eagerly
            step.__class__ = CompiledBlock
    return model


class CompiledBackbone(Backbone):
    """A model whose token-local parts are compiled."""

    def embed(self, inputs: Tensor) -> Tensor:
        if not _compiles(inputs):
            return super().embed(inputs)
        return _compiled(Backbone.embed)(self, inputs)  # type: ignore[no-any-return]

    def head(self, x: Tensor) -> Tensor:
        if not _compiles(x):
            return super().head(x)
        return _compiled(Backbone.head)(self, x)  # type: ignore[no-any-return]


class CompiledBlock(Block):
    """A block whose token-local parts are compiled; the shortest chunks run eagerly, and so do
    dropout and mixers that read the site.

    The block is an argument of what is compiled, so that all blocks share one program.
    """

    def tokens(self, x: Tensor, site: Site) -> Tokens:
        """Tokens that make what one stage reads in one compiled call."""
        eager = super().tokens(x, site)
        if self.needs or not _compiles(x):
            return eager
        groups: dict[str, tuple[str, ...]] = {name: (name,) for name in eager.names}
        for stage in self.stages:
            groups |= dict.fromkeys(stage.reads, stage.reads)

        def maker(name: str) -> Callable[[Tokens], Tensor]:
            def make(tokens: Tokens) -> Tensor:
                made = _compiled(_read)(self, x, groups[name])
                tokens.computed |= dict(zip(groups[name], made, strict=True))
                return tokens.computed[name]

            return make

        return Tokens({name: maker(name) for name in eager.names})

    def mix(self, x: Tensor, tokens: Tokens, state: State, site: Site) -> Tensor:
        if not site.is_empty or not _compiles(x, *tokens.computed.values()):
            return super().mix(x, tokens, state, site)
        # One layout, however many chunks the state was merged from.
        state = {name: t.contiguous() for name, t in state.items()}
        return _compiled(_mix)(self, x, tokens.computed, state)  # type: ignore[no-any-return]

    def feed(self, x: Tensor, site: Site) -> Tensor:
        if not site.is_empty or not _compiles(x):
            return super().feed(x, site)
        return _compiled(_feed)(self, x)  # type: ignore[no-any-return]


def _compiles(x: Tensor, *computed: Tensor) -> bool:
    """Whether a chunk x [B, n, C], with its tensors [B, H, n, D], is compiled; then for any n."""
    if x.shape[1] <= 1:
        return False
    if not torch.compiler.is_compiling():
        for t in (x, *computed):
            torch._dynamo.maybe_mark_dynamic(t, t.ndim - 2)
    return True


def _read(block: Block, x: Tensor, names: tuple[str, ...]) -> tuple[Tensor, ...]:
    tokens = Block.tokens(block, x, Site())
    return tuple(tokens[name] for name in names)


def _mix(block: Block, x: Tensor, computed: Mapping[str, Tensor], state: State) -> Tensor:
    tokens = Block.tokens(block, x, Site())
    tokens.computed.update(computed)
    return Block.mix(block, x, tokens, state, Site())


def _feed(block: Block, x: Tensor) -> Tensor:
    return Block.feed(block, x, Site())


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # The first use of torch.compile imports the compiler, which takes seconds.
    return torch.compile(function, fullgraph=True)
