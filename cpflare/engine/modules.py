"""What keeps a model an ordinary module although an executor runs its parts chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def with_leaves(module: M, parameters: Sequence[Tensor]) -> tuple[M, list[Tensor]]:
    """A twin of a module whose `parameters` are leaves of their own, on the same memory.

    Gradients that a twin's backward gathers chunk by chunk stay out of the module's own until they
    are whole, and parameters that a functional call has put in place for its forward are still
    there in the backward. The module is left as it is, so that threads may do this side by side.
    """
    leaves = [nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in parameters]
    by_parameter = {id(p): leaf for p, leaf in zip(parameters, leaves, strict=True)}
    twin = twin_of(
        module,
        lambda own: {
            name: None if p is None else by_parameter[id(p)] for name, p in own._parameters.items()
        },
    )
    return twin, list(leaves)


def twin_of(module: M, parameters: Callable[[nn.Module], dict[str, Any]]) -> M:
    """The same module, with what `parameters` says of it and of each of its children.

    Buffers, hooks and all else are shared. The module is left as it is.
    """
    twins: dict[int, nn.Module] = {}

    def make(module: nn.Module) -> nn.Module:
        if id(module) not in twins:
            twin = twins[id(module)] = module.__class__.__new__(module.__class__)
            twin.__dict__.update(module.__dict__)
            twin._parameters = parameters(module)
            twin._modules = {
                name: None if child is None else make(child)
                for name, child in module._modules.items()
            }
        return twins[id(module)]

    twin = make(module)
    assert isinstance(twin, type(module))
    return twin


def require_no_hooks(blocks: Iterable[nn.Module]) -> None:
    """Refuse hooks that no executor calls: it runs a block's parts, and never the block.

    Raises:
        RuntimeError: a block has a hook.
    """
    for index, block in enumerate(blocks):
        hooks = (
            block._forward_pre_hooks,
            block._forward_hooks,
            block._backward_pre_hooks,
            block._backward_hooks,
        )
        if any(hooks):
            raise RuntimeError(
                f"the hook on blocks.{index} would not run, since an executor runs a block's parts "
                "chunk by chunk; hook the model or a part, or set model.executor = None"
            )
