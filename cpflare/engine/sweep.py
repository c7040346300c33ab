"""The sweeps of the streamed executor: blocks chunk by chunk, and nothing of size N but inputs.

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

from cpflare.engine.activations import ActivationStore
from cpflare.models.backbone import Backbone, Site, Step
from cpflare.models.conditioning import Conditioning
from cpflare.models.mixer import Adjoint, Pull, Reduction, Stage, State, Tokens


@dataclass
class Memory:
    """What a stage's reduction left, and the names of the state that came of it."""

    stage: Stage
    reduction: Reduction
    produced: tuple[str, ...]


@dataclass
class BlockMemory:
    """The small replicated tensors of a block, or of what comes before all blocks."""

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
        self.prologue = BlockMemory()  # of the conditioning
        self.encoded: Tensor | None = None  # [B, n, D_h], the conditions of all chunks
        self.is_spent = False
        self.d_inputs: Tensor | None = None
        self.autocast = _current_autocast(next(model.parameters()).device)

    # ---- forward ----------------------------------------------------------------------------

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, n, F] -> [B, n, O], without gradients; remembers what the backward needs."""
        with torch.no_grad(), self.autocast():
            self._condition(inputs)
            if self.store.keeps:
                for rows, _ in self.chunks:
                    self.store.put(0, rows, self.model.embed(inputs[:, rows]))
            for index, block in enumerate(self.model.steps):
                sweeps = [self._tokens(block, stage, index) for stage in block.stages]
                self.memories.append(self._reduce(block.stages, sweeps, inputs.shape[0]))
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

    def _condition(self, inputs: Tensor) -> None:
        """Encode the conditions, and run the stages that come before all blocks.

        Where nothing of size N is kept, a chunk's are encoded anew wherever they are read.
        Communication: one reduction a stage.
        """
        conditioning = self.model.conditioning
        if conditioning is None:
            return
        kept = conditioning.kept

        def make() -> tuple[Tensor | None, BlockMemory]:
            return self._encode(conditioning, inputs), self._pool(conditioning, inputs.shape[0])

        self.raw = self.model.conditions(inputs)
        self.encoded, self.prologue = make() if kept is None else kept.of(inputs.shape[1], make)

    def _encode(self, conditioning: Conditioning, inputs: Tensor) -> Tensor | None:
        if not self.store.keeps:
            return None
        for rows, _ in self.chunks:
            e = conditioning.encode(self.raw[:, rows])
            if self.encoded is None:
                self.encoded = e.new_empty((*inputs.shape[:2], e.shape[-1]))
            self.encoded[:, rows] = e
        return self.encoded

    def _pool(self, conditioning: Conditioning, batch: int) -> BlockMemory:
        stages = conditioning.stages
        sweeps = [
            (conditioning.tokens(self._encoded(r)).prepare(stage.reads) for r, _ in self.chunks)
            for stage in stages
        ]
        return self._reduce(stages, sweeps, batch)

    def _encoded(self, rows: slice) -> Tensor:
        assert self.model.conditioning is not None
        if self.encoded is None:
            return self.model.conditioning.encode(self.raw[:, rows])
        return self.encoded[:, rows]

    def _site(self, rows: slice, site: Site) -> Site:
        """A chunk's site with its conditions, if there are any."""
        steer = self.model.conditioning
        if steer is None:
            return site
        return replace(
            site, steer=steer, condition=self._encoded(rows), context=self.prologue.state
        )

    def _reduce(
        self, stages: Sequence[Stage], sweeps: Sequence[Iterator[Tokens]], batch: int
    ) -> BlockMemory:
        """Stages, a sweep over the chunks' tokens each. Communication: one reduction a stage."""
        memory = BlockMemory()
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
            here = self._site(rows, site)
            yield block.tokens(self.store.get(index, rows), here).prepare(stage.reads)

    def block_input(self, index: int, inputs: Tensor, rows: slice) -> Tensor:
        """A chunk's input of a block, from the network's inputs [B, n, F]."""
        x = self.model.embed(inputs[:, rows])
        site = self._site(rows, next(site for known, site in self.chunks if known == rows))
        for block, memory in zip(self.model.steps[:index], self.memories, strict=False):
            x = block.emit(x, block.tokens(x, site), memory.state, site)
        return x

    def _emit(self, index: int) -> None:
        """From a block's input to its output, which is the next one's input."""
        block, state = self.model.steps[index], self.memories[index].state
        for rows, site in self.chunks:
            x, here = self.store.get(index, rows), self._site(rows, site)
            self.store.put(index + 1, rows, block.emit(x, block.tokens(x, here), state, here))

    # ---- backward ---------------------------------------------------------------------------

    def backward(self, inputs: Tensor, d_outputs: Tensor, needs_inputs: bool) -> Tensor | None:
        """Add to the leaves' gradients; returns the inputs' [B, n, F] where it is asked for.

        Communication: one all-reduce a stage.
        """
        self.is_spent = True
        self.d_inputs = torch.zeros_like(inputs) if needs_inputs else None
        self.d_encoded = None if self.encoded is None else torch.zeros_like(self.encoded)
        self.context = _leaves(self.prologue.state)
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
        self._backward_prologue()
        for rows, _ in self.chunks:
            chunk = inputs[:, rows].detach().requires_grad_(needs_inputs)
            with self._recording():
                pairs = [(self.model.embed(chunk), grads.get(0, rows))]
                if self.model.conditioning is not None and self.d_encoded is not None:
                    e = self.model.conditioning.encode(self.model.conditions(chunk))
                    pairs.append((e, self.d_encoded[:, rows]))
            _pull(pairs)
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
        state = _leaves(memory.state)
        for rows, site in self.chunks:
            x = self._leaf(index, rows)
            with self._reading(rows, site) as here:
                with self._recording():
                    out = block.emit(x, block.tokens(x, here), state, here)
                _pull([(out, grads.get(0, rows))])
            grads.put(0, rows, _grad(x))
        for stage in reversed(memory.stages):
            with self._stage_adjoint(stage, state) as adjoint:
                for rows, site in self.chunks:
                    x = self._leaf(index, rows)
                    with self._reading(rows, site) as here:
                        with self._recording():
                            chunk = adjoint.chunk(block.tokens(x, here))
                        _pull(chunk)
                    grads.put(0, rows, grads.get(0, rows) + _grad(x))

    def _backward_prologue(self) -> None:
        """Communication: one all-reduce a stage that comes before all blocks."""
        conditioning = self.model.conditioning
        for stage in reversed(self.prologue.stages):
            assert conditioning is not None
            with self._stage_adjoint(stage, self.context) as adjoint:
                for rows, site in self.chunks:
                    with self._reading(rows, site) as here:
                        assert here.condition is not None
                        with self._recording():
                            chunk = adjoint.chunk(conditioning.tokens(here.condition))
                        _pull(chunk)

    @contextmanager
    def _stage_adjoint(self, memory: Memory, state: State) -> Iterator[Adjoint]:
        """From the gradients of the state that a stage produced to those of its tokens, a chunk at
        a time inside, and of what it was opened with.

        `state` are leaves whose `.grad` gathers what came later. Communication: one all-reduce.
        """
        stage = memory.stage
        output = memory.reduction.output.detach().requires_grad_()
        with self._recording():
            new = stage.finish(output, state)
        _pull([(new[name], _grad(state[name])) for name in memory.produced])
        adjoint = memory.reduction.adjoint(_grad(output), self.model.reducer)
        yield adjoint
        with self._recording():
            opened = adjoint.close(state)
        _pull(opened)

    def _leaf(self, index: int, rows: slice) -> Tensor:
        return self.store.get(index, rows).detach().requires_grad_()

    @contextmanager
    def _reading(self, rows: slice, site: Site) -> Iterator[Site]:
        """A chunk's site, whose conditions' gradient is added to the others, and its inputs' where
        it is asked for."""
        here = self._site(rows, site)
        if self.d_encoded is not None:
            assert here.condition is not None
            e = here.condition.detach().requires_grad_()
            here = replace(here, condition=e, context=self.context)
        if self.d_inputs is not None and site.inputs is not None:
            here = replace(here, inputs=site.inputs.detach().requires_grad_())
        yield here
        if self.d_encoded is not None and e.grad is not None:
            self.d_encoded[:, rows] += e.grad
        if self.d_inputs is not None and here.inputs is not None:
            self.d_inputs[:, rows] += _grad(here.inputs)

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


def _leaves(state: State) -> State:
    return {name: t.detach().requires_grad_(t.is_floating_point()) for name, t in state.items()}


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
