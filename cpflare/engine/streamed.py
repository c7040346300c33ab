"""The streamed executor: the same blocks chunk by chunk, with nothing of size N but block inputs.

Forward of a block: one sweep over the chunks for each reduce stage, then one for its emit. What is
kept is the block's input and the stages' small state. Backward: one sweep for the emit (recompute
the chunk, get dx and the partial gradients of the state), then for each stage, from the last to the
first: all-reduce its output's gradient, and one sweep for its local part. The collectives are those
of the in-memory executor, and none is repeated.

Source: mathematics of reduce stages and emit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cpflare.engine.activations import ActivationStore, NoActivations
from cpflare.engine.chunks import chunk_bounds
from cpflare.engine.modules import require_no_hooks, with_leaves
from cpflare.models.backbone import Backbone, Site, Step
from cpflare.models.mixer import Pull, Reduction, Stage, State, Tokens


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

    def __call__(self, model: Backbone, inputs: Tensor, site: Site) -> Tensor:
        """inputs [B, n, F] -> outputs [B, n, O]. Communication: as the model's own forward."""
        require_no_hooks(model.blocks)
        with_grad = torch.is_grad_enabled()
        store = ActivationStore(
            inputs.shape[1], half=self.half, host=self.host, in_place=not with_grad
        )
        bounds = chunk_bounds(inputs, model.widest, model.chunk_tokens)
        here = site.detached()
        chunks = [(rows, here.part(rows)) for rows in bounds]
        if with_grad:
            parameters = list(model.parameters())
            twin, leaves = with_leaves(model, parameters)
            sweep = Sweep(twin, store, chunks, self.keep_every, leaves)
            return Streamed.apply(sweep, inputs, *parameters)  # type: ignore[no-any-return, no-untyped-call]
        sweep = Sweep(model, store, chunks, self.keep_every)
        if self.keep_none:
            sweep.store = NoActivations(
                inputs.shape[1], lambda index, rows: sweep.block_input(index, inputs, rows)
            )
        return sweep.forward(inputs)


class Streamed(torch.autograd.Function):
    """inputs [B, n, F] -> outputs [B, n, O], both of this rank's tokens.

    The parameters are inputs like any other, and get their gradients once.
    """

    @staticmethod
    def forward(ctx: Any, sweep: Sweep, inputs: Tensor, *parameters: Tensor) -> Tensor:
        ctx.sweep = sweep
        ctx.save_for_backward(inputs, *parameters)  # a change until the backward is an error
        return sweep.forward(inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_outputs: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors[0]
        if ctx.sweep.is_spent:
            raise RuntimeError(
                "the streamed executor frees block inputs as its backward goes; for a second "
                "backward run the forward again"
            )
        d_inputs = ctx.sweep.backward(inputs, d_outputs, ctx.needs_input_grad[1])
        return None, d_inputs, *(leaf.grad for leaf in ctx.sweep.leaves)


@dataclass
class Memory:
    """What a stage's reduction left, and the names of the state that came of it."""

    stage: Stage
    reduction: Reduction
    produced: tuple[str, ...]


@dataclass
class BlockMemory:
    """The small replicated tensors of a block."""

    stages: list[Memory] = field(default_factory=list)
    state: State = field(default_factory=dict)


class Sweep:
    """One forward and backward of a model over the chunks of this rank's tokens.

    The backward adds to the gradients of `leaves`, the model's parameters.
    """

    def __init__(
        self,
        model: Backbone,
        store: ActivationStore,
        chunks: Sequence[tuple[slice, Site]],
        keep_every: int,
        leaves: Sequence[Tensor] = (),
    ) -> None:
        self.model, self.store, self.chunks, self.keep_every = model, store, chunks, keep_every
        self.leaves = leaves
        self.memories: list[BlockMemory] = []
        self.is_spent = False
        self.d_inputs: Tensor | None = None
        self.autocast = _current_autocast(next(model.parameters()).device)

    # ---- forward ----------------------------------------------------------------------------

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, n, F] -> [B, n, O], without gradients; remembers what the backward needs."""
        with torch.no_grad(), self.autocast():
            if self.store.keeps:
                for rows, _ in self.chunks:
                    self.store.put(0, rows, self.model.embed(inputs[:, rows]))
            for index, block in enumerate(self.model.steps):
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

    def _reduce(self, block: Step, index: int, batch: int) -> BlockMemory:
        """A block's stages, one sweep each. Communication: one reduction a stage."""
        memory = BlockMemory()
        stages = block.stages
        sweeps = [self._tokens(block, stage, index) for stage in stages]
        ahead: list[Tokens] = []
        for stage, sweep, following in zip(stages, sweeps, [*sweeps[1:], iter(())], strict=False):
            reduction = stage.open(memory.state, batch)
            reduction.add(chain(ahead, sweep))
            wait = reduction.start(self.model.reducer)
            ahead = list(islice(following, 1))  # computed while the messages are on their way
            new = stage.finish(wait(), memory.state)
            memory.stages.append(Memory(stage, reduction, tuple(new)))
            memory.state |= new
        return memory

    def _tokens(self, block: Step, stage: Stage, index: int) -> Iterator[Tokens]:
        """The chunks' tokens, with what the stage reads already computed."""
        for rows, site in self.chunks:
            yield block.tokens(self.store.get(index, rows), site).prepare(stage.reads)

    def block_input(self, index: int, inputs: Tensor, rows: slice) -> Tensor:
        """A chunk's input of a block, from the network's inputs [B, n, F]."""
        x = self.model.embed(inputs[:, rows])
        site = next(site for known, site in self.chunks if known == rows)
        for block, memory in zip(self.model.steps[:index], self.memories, strict=False):
            x = block.emit(x, block.tokens(x, site), memory.state, site)
        return x

    def _emit(self, index: int) -> None:
        """From a block's input to its output, which is the next one's input."""
        block, state = self.model.steps[index], self.memories[index].state
        for rows, site in self.chunks:
            x = self.store.get(index, rows)
            self.store.put(index + 1, rows, block.emit(x, block.tokens(x, site), state, site))

    # ---- backward ---------------------------------------------------------------------------

    def backward(self, inputs: Tensor, d_outputs: Tensor, needs_inputs: bool) -> Tensor | None:
        """Add to the leaves' gradients; returns the inputs' [B, n, F] where it is asked for.

        Communication: one all-reduce a stage.
        """
        self.is_spent = True
        self.d_inputs = torch.zeros_like(inputs) if needs_inputs else None
        last = len(self.memories)
        grads = ActivationStore(self.store.tokens)  # of the input of the block at hand, at index 0
        for rows, _ in self.chunks:
            x = self._leaf(last, rows)
            with self._recording():
                out = self.model.head(x)
            _pull([(out, d_outputs[:, rows])])
            grads.put(0, rows, _grad(x))
        self.store.free(last)
        for index in reversed(range(last)):
            self._recompute(index)
            self._backward_block(index, grads)
            self.store.free(index)
        for rows, _ in self.chunks:
            chunk = inputs[:, rows].detach().requires_grad_(needs_inputs)
            with self._recording():
                x = self.model.embed(chunk)
            _pull([(x, grads.get(0, rows))])
            if self.d_inputs is not None:
                self.d_inputs[:, rows] += _grad(chunk)
        return self.d_inputs

    def _recompute(self, index: int) -> None:
        """Bring back a block input that was not kept, and those after the last kept one."""
        start = index
        while start not in self.store:
            start -= 1
        with torch.no_grad(), self.autocast():
            for between in range(start, index):
                self._emit(between)

    def _backward_block(self, index: int, grads: ActivationStore) -> None:
        """Communication: one all-reduce a stage."""
        block, memory = self.model.steps[index], self.memories[index]
        state = {
            name: t.detach().requires_grad_(t.is_floating_point())
            for name, t in memory.state.items()
        }
        for rows, site in self.chunks:
            x = self._leaf(index, rows)
            with self._reading(rows, site) as here:
                with self._recording():
                    out = block.emit(x, block.tokens(x, here), state, here)
                _pull([(out, grads.get(0, rows))])
            grads.put(0, rows, _grad(x))
        for stage in reversed(memory.stages):
            self._backward_stage(block, stage, state, index, grads)

    def _backward_stage(
        self, block: Step, memory: Memory, state: State, index: int, grads: ActivationStore
    ) -> None:
        """From the gradients of the state that a stage produced to those of its tokens and of what
        it was opened with.

        `state` are leaves whose `.grad` gathers what came later. Communication: one all-reduce.
        """
        stage = memory.stage
        output = memory.reduction.output.detach().requires_grad_()
        with self._recording():
            new = stage.finish(output, state)
        _pull([(new[name], _grad(state[name])) for name in memory.produced])
        adjoint = memory.reduction.adjoint(_grad(output), self.model.reducer)
        for rows, site in self.chunks:
            x = self._leaf(index, rows)
            with self._reading(rows, site) as here:
                with self._recording():
                    chunk = adjoint.chunk(block.tokens(x, here))
                _pull(chunk)
            grads.put(0, rows, grads.get(0, rows) + _grad(x))
        with self._recording():
            opened = adjoint.close(state)
        _pull(opened)

    def _leaf(self, index: int, rows: slice) -> Tensor:
        return self.store.get(index, rows).detach().requires_grad_()

    @contextmanager
    def _reading(self, rows: slice, site: Site) -> Iterator[Site]:
        """A chunk's site, whose inputs' gradient is added to the others where it is asked for."""
        if self.d_inputs is None or site.inputs is None:
            yield site
            return
        leaf = site.inputs.detach().requires_grad_()
        yield replace(site, inputs=leaf)
        self.d_inputs[:, rows] += _grad(leaf)

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Autograd, under the forward's autocast."""
        with torch.enable_grad(), self.autocast():
            yield


def _pull(pairs: Pull) -> None:
    """Back-propagate into the leaves; what has none (a constant, frozen parameters) is left out."""
    wanted = [(out, grad.to(out.dtype)) for out, grad in pairs if out.requires_grad]
    if wanted:
        outs, grads = zip(*wanted, strict=True)
        torch.autograd.backward(outs, grads)


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
