"""The streamed executor: the same blocks chunk by chunk, with nothing of size N but block inputs.

Forward of a block: one sweep over the chunks for each reduce stage, then one for its emit. What is
kept is the block's input and the stages' small state. Backward: one sweep for the emit (recompute
the chunk, get dx and the partial gradients of the state), then for each stage, from the last to the
first: all-reduce its state's gradient, and one sweep for its local part. The collectives are those
of the in-memory executor, and none is repeated.

Source: mathematics of reduce stages and emit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cpflare.engine.activations import ActivationStore, NoActivations
from cpflare.models.backbone import Backbone, Block, Drop
from cpflare.models.mixer import SoftmaxStage, State
from cpflare.ops.attention import attend_backward
from cpflare.ops.chunked import encode_chunks, sum_state_gradient
from cpflare.ops.merge import start_merge


@dataclass(frozen=True)
class StreamedExecutor:
    """Runs a model with bounded memory; see the file's first lines.

    `keep_every` keeps every k-th block input and recomputes those between from it, once, in the
    backward. `half` and `host` say how kept inputs are held (`ActivationStore`). `keep_none`, for
    predictions alone, keeps no block input at all (`NoActivations`).
    """

    keep_every: int = 1
    half: bool = False
    host: bool = False
    keep_none: bool = False

    def __call__(
        self, model: Backbone, inputs: Tensor, bounds: Sequence[slice], drops: Sequence[Drop | None]
    ) -> Tensor:
        """inputs [B, n, F] -> outputs [B, n, O]. Communication: as the model's own forward."""
        with_grad = torch.is_grad_enabled()
        store = ActivationStore(
            inputs.shape[1], half=self.half, host=self.host, in_place=not with_grad
        )
        sweep = Sweep(model, store, bounds, drops, self.keep_every)
        if not with_grad:
            if self.keep_none:
                sweep.store = NoActivations(
                    inputs.shape[1], lambda index, rows: sweep.block_input(index, inputs[:, rows])
                )
            return sweep.forward(inputs)
        trigger = torch.empty(0, device=inputs.device, requires_grad=True)
        return Streamed.apply(inputs, trigger, sweep)  # type: ignore[no-any-return, no-untyped-call]


class Streamed(torch.autograd.Function):
    """inputs [B, n, F] -> outputs [B, n, O], both of this rank's tokens.

    The parameters' gradients are added to their `.grad` in the backward, as autograd itself does;
    `trigger` only makes the outputs require a gradient.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, trigger: Tensor, sweep: Sweep) -> Tensor:
        ctx.sweep = sweep
        ctx.save_for_backward(inputs)
        return sweep.forward(inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_outputs: Tensor) -> tuple[Tensor | None, None, None]:
        (inputs,) = ctx.saved_tensors
        if ctx.sweep.is_spent:
            raise RuntimeError(
                "the streamed executor frees block inputs as its backward goes; for a second "
                "backward run the forward again"
            )
        return ctx.sweep.backward(inputs, d_outputs, ctx.needs_input_grad[0]), None, None


@dataclass
class Reduced:
    """What one stage's reduction left: its queries, and the global result and log-sum-exp."""

    q: Tensor  # [B, H, M, D]
    z: Tensor  # [B, H, M, D], in the statistics' dtype
    lse: Tensor  # [B, H, M]
    produced: tuple[str, ...]  # names of the state that came of it

    @property
    def output(self) -> Tensor:
        """The result in the dtype that the mixer goes on with."""
        return self.z.to(self.q.dtype)


@dataclass
class BlockMemory:
    """The small replicated tensors of a block."""

    reduced: list[Reduced] = field(default_factory=list)
    state: State = field(default_factory=dict)


class Sweep:
    """One forward and backward of a model over the chunks of this rank's tokens."""

    def __init__(
        self,
        model: Backbone,
        store: ActivationStore,
        bounds: Sequence[slice],
        drops: Sequence[Drop | None],
        keep_every: int,
    ) -> None:
        self.model, self.store, self.keep_every = model, store, keep_every
        self.chunks = list(zip(bounds, drops, strict=True))
        self.memories: list[BlockMemory] = []
        self.is_spent = False
        self.autocast = _current_autocast(next(model.parameters()).device)

    @property
    def blocks(self) -> list[Block]:
        return list(self.model.blocks)  # type: ignore[arg-type]

    # ---- forward ----------------------------------------------------------------------------

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, n, F] -> [B, n, O], without gradients; remembers what the backward needs."""
        with torch.no_grad(), self.autocast():
            if self.store.keeps:
                for rows, _ in self.chunks:
                    self.store.put(0, rows, self.model.in_proj(inputs[:, rows]))
            for index, block in enumerate(self.blocks):
                self.memories.append(self._reduce(block, index, inputs.shape[0]))
                if self.store.keeps:
                    self._emit(index)
                if index % self.keep_every:
                    self.store.free(index)
            return self._head(inputs)

    def _head(self, inputs: Tensor) -> Tensor:
        """The outputs, written into one tensor as the chunks come."""
        outputs: Tensor | None = None
        for rows, _ in self.chunks:
            chunk = self.model.head(self.store.get(len(self.memories), rows))
            if outputs is None:
                outputs = chunk.new_empty((*inputs.shape[:2], chunk.shape[-1]))
            outputs[:, rows] = chunk
        assert outputs is not None
        return outputs

    def _reduce(self, block: Block, index: int, batch: int) -> BlockMemory:
        """A block's stages, one sweep each. Communication: one encoder a stage."""
        memory = BlockMemory()
        stages = block.mixer.stages
        sweeps = [self._keys_and_values(block, stage, index) for stage in stages]
        ahead: list[tuple[Tensor, Tensor]] = []
        for stage, sweep, following in zip(stages, sweeps, [*sweeps[1:], ()], strict=False):
            q = stage.queries(memory.state, batch)
            partial = encode_chunks(q, chain(ahead, sweep), scale=stage.scale)
            wait = start_merge(*partial, self.model.reducer.comm)
            ahead = list(islice(following, 1))  # computed while the messages are on their way
            z, lse = wait()
            new = stage.finish(z.to(q.dtype), memory.state)
            memory.reduced.append(Reduced(q, z, lse, tuple(new)))
            memory.state |= new
        return memory

    def _keys_and_values(
        self, block: Block, stage: SoftmaxStage, index: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for rows, _ in self.chunks:
            yield stage.keys_and_values(block.tokens(self.store.get(index, rows)))

    def block_input(self, index: int, inputs: Tensor) -> Tensor:
        """A chunk's input of a block, from the network's inputs [B, m, F]."""
        x: Tensor = self.model.in_proj(inputs)
        for block, memory in zip(self.blocks[:index], self.memories, strict=False):
            x = _emit_chunk(block, x, memory.state, None)
        return x

    def _emit(self, index: int) -> None:
        """From a block's input to its output, which is the next one's input."""
        block, state = self.blocks[index], self.memories[index].state
        for rows, drop in self.chunks:
            x = self.store.get(index, rows)
            self.store.put(index + 1, rows, _emit_chunk(block, x, state, drop))

    # ---- backward ---------------------------------------------------------------------------

    def backward(self, inputs: Tensor, d_outputs: Tensor, needs_inputs: bool) -> Tensor | None:
        """Add to the parameters' gradients; returns the inputs' [B, n, F] where it is asked for.

        Communication: one all-reduce a stage.
        """
        self.is_spent = True
        last = len(self.memories)
        grads = ActivationStore(self.store.tokens)  # of the input of the block at hand, at index 0
        for rows, _ in self.chunks:
            x = self._leaf(last, rows)
            self._pull(d_outputs[:, rows], self.model.head, x)
            grads.put(0, rows, _grad(x))
        self.store.free(last)
        for index in reversed(range(last)):
            self._recompute(index)
            self._backward_block(index, grads)
            self.store.free(index)
        d_inputs = torch.empty_like(inputs) if needs_inputs else None
        for rows, _ in self.chunks:
            chunk = inputs[:, rows].detach().requires_grad_(needs_inputs)
            self._pull(grads.get(0, rows), self.model.in_proj, chunk)
            if d_inputs is not None:
                d_inputs[:, rows] = _grad(chunk)
        return d_inputs

    def _recompute(self, index: int) -> None:
        """Bring back a block input that was not kept, and those after the last kept one."""
        start = index
        while start not in self.store:
            start -= 1
        with torch.no_grad(), self.autocast():
            for between in range(start, index):
                self._emit(between)

    def _backward_block(self, index: int, grads: ActivationStore) -> None:
        block, memory = self.blocks[index], self.memories[index]
        state = {name: t.detach().requires_grad_() for name, t in memory.state.items()}
        for rows, drop in self.chunks:
            x = self._leaf(index, rows)
            self._pull(grads.get(0, rows), _emit_chunk, block, x, state, drop)
            grads.put(0, rows, _grad(x))
        for stage, reduced in zip(
            reversed(block.mixer.stages), reversed(memory.reduced), strict=True
        ):
            self._backward_stage(block, stage, reduced, state, index, grads)

    def _backward_stage(
        self,
        block: Block,
        stage: SoftmaxStage,
        reduced: Reduced,
        state: State,
        index: int,
        grads: ActivationStore,
    ) -> None:
        """From the gradients of the state that a stage produced to those of its tokens and queries.

        `state` are leaves whose `.grad` gathers what came later. Communication: one all-reduce.
        """
        z = reduced.output.detach().requires_grad_()
        for name in reduced.produced:
            self._pull(_grad(state[name]), _finish, stage, z, state, name)
        dz = sum_state_gradient(_grad(z), reduced.q.dtype, self.model.reducer.comm)
        dq = torch.zeros_like(reduced.q, dtype=dz.dtype)
        for rows, _ in self.chunks:
            x = self._leaf(index, rows)
            with torch.enable_grad(), self.autocast():
                k, v = stage.keys_and_values(block.tokens(x))
            dq_chunk, dk, dv = attend_backward(
                dz, reduced.q, k.detach(), v.detach(), reduced.z, reduced.lse, scale=stage.scale
            )
            dq += dq_chunk
            if k is v:
                torch.autograd.backward(k, dk + dv)
            else:
                torch.autograd.backward((k, v), (dk, dv))
            grads.put(0, rows, grads.get(0, rows) + _grad(x))
        self._pull(dq.to(reduced.q.dtype), stage.queries, state, reduced.q.shape[0])

    def _leaf(self, index: int, rows: slice) -> Tensor:
        return self.store.get(index, rows).detach().requires_grad_()

    def _pull(self, grad: Tensor, compute: Callable[..., Tensor], *arguments: Any) -> None:
        """Compute again with gradients, and back-propagate `grad` through it into the leaves."""
        with torch.enable_grad(), self.autocast():
            out = compute(*arguments)
        if out.requires_grad:  # not where parameters are frozen
            torch.autograd.backward(out, grad.to(out.dtype))


def _emit_chunk(block: Block, x: Tensor, state: State, drop: Drop | None) -> Tensor:
    return block.emit(x, block.tokens(x), state, drop)


def _finish(stage: SoftmaxStage, z: Tensor, state: State, name: str) -> Tensor:
    return stage.finish(z, state)[name]


def _grad(leaf: Tensor) -> Tensor:
    """A leaf's gradient; zero where nothing reached it (no tokens on this rank, say)."""
    return leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)


def _current_autocast(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """The autocast that is on now, to be entered again in the backward, where it is off.

    Without its cache: a cast weight must not outlive the chunk whose graph it belongs to.
    """
    if not torch.is_autocast_enabled(device.type):
        return nullcontext
    dtype = torch.get_autocast_dtype(device.type)
    return lambda: torch.autocast(device.type, dtype=dtype, cache_enabled=False)
