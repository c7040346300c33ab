"""A CUDA device without data for this process, and what the host asks of it, counted.

Importing this makes PyTorch's CPU build believe in one GPU; it cannot be undone, so that only the
processes of `support.fake_cuda` import it, before anything else brings in torch. Tensors have
shapes, dtypes and layouts; what the host reads of them says nothing. Numerics, races of streams,
NCCL itself and compiled kernels stay unseen.
"""

from __future__ import annotations

import ctypes
import os
import sys
import types
from collections import Counter
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

assert "torch" not in sys.modules, "torch has read its hooks already"
_torch = Path(str(find_spec("torch").origin)).parent
for _library in ("libc10.so", "libtorch_cpu.so"):
    ctypes.CDLL(str(_torch / "lib" / _library), ctypes.RTLD_GLOBAL)
ctypes.CDLL(os.environ["FAKE_CUDA_LIBRARY"], ctypes.RTLD_GLOBAL)  # before torch reads its hooks

import numpy as np  # noqa: E402
import safetensors.torch  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.utils.clip_grad as clip_grad  # noqa: E402
import torch.optim.optimizer as optimizer  # noqa: E402
import torch.utils._foreach_utils as foreach_utils  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map_only  # noqa: E402

_MEMORY_ONLY = {
    f"aten::{name}"
    for name in (
        "empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like", "detach",
        "alias", "lift_fresh", "_reshape_alias", "_unsafe_view",
    )
}  # fmt: skip

_NCCL_DTYPES = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int8, torch.uint8, torch.bool,
}  # fmt: skip

_OURS = tuple(
    f"{Path(__file__).parents[2] / room}{os.sep}" for room in ("cpflare", "launch", "benchmarks")
)


class FakeGPU(TorchDispatchMode):
    """Inside, tensors are fake, and this counts what goes to the GPU and what waits for it.

    `launches` and `bytes` by operator, `lines` by operator and line; `syncs` and `copies` (between
    host and device, with whether they block) by the line of the product that causes them;
    `collectives` by kind.
    """

    current: ClassVar[FakeGPU | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.reset()

    def reset(self) -> None:
        """Count from zero."""
        self.launches: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.lines: Counter[str] = Counter()
        self.syncs: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()
        self.timing_events = 0
        self.dtypes: dict[str, set[torch.dtype]] = {}  # of the first output, by operator

    def counts(self) -> dict[str, int]:
        """The totals."""
        names = ("launches", "collectives", "syncs", "copies", "bytes")
        return {name: sum(getattr(self, name).values()) for name in names}

    def __enter__(self) -> FakeGPU:
        self.mode.__enter__()
        FakeGPU.current = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        FakeGPU.current = None
        self.mode.__exit__(*error)

    def waits(self, why: str) -> None:
        """The host waits for the device."""
        self.syncs[f"{why} {_site()}"] += 1

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        if name.startswith("prim::"):
            return func(*args, **kwargs)
        args, kwargs = tree_map_only(Tensor, self._faked, (args, kwargs))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_gpu = any(t.is_cuda for t in inputs)
        if name in ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"):
            if on_gpu:
                self.waits(name)
            return _value(args[0])
        if name.startswith("c10d::"):
            self._collective(name, inputs)
        if name == "aten::nonzero":
            self.waits(name)
            out: Any = args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
        elif name in _KERNELS:
            out = _KERNELS[name](*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if name in ("aten::_to_copy", "aten::copy_"):
            self._copy(name, args, kwargs, outputs)
        if on_gpu or any(t.is_cuda for t in outputs):
            self._launch(func, name, inputs + outputs)
            self.dtypes.setdefault(name, set()).update(t.dtype for t in outputs[:1])
        return out

    def _faked(self, t: Tensor) -> Tensor:
        """The same without values, which what is made from lists still has."""
        if not isinstance(t, FakeTensor):
            return self.mode.from_tensor(t)
        t.constant = None
        return t

    def _launch(self, func: Any, name: str, tensors: list[Tensor]) -> None:
        if name.startswith("c10d::") or func.is_view or name in _MEMORY_ONLY:
            return
        self.launches[name] += 1
        self.lines[f"{name} {_site()}"] += 1
        self.bytes[name] += sum(t.numel() * t.element_size() for t in tensors)

    def _copy(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: list[Tensor]
    ) -> None:
        source, target = (args[1], args[0]) if name == "aten::copy_" else (args[0], outputs[0])
        if source.is_cuda == target.is_cuda:
            return
        waits = not (kwargs.get("non_blocking", False) or (name == "aten::copy_" and args[2:3]))
        way = "to host" if source.is_cuda else "to device"
        self.copies[f"{way}{', blocking' if waits else ''} {_site()}"] += 1
        if waits:
            self.waits(f"copy {way}")

    def _collective(self, name: str, tensors: list[Tensor]) -> None:
        """Count it, and refuse what NCCL refuses."""
        kind = name.removeprefix("c10d::").strip("_")
        if kind == "barrier":
            self.collectives[kind] += 1
            return
        for t in tensors:
            if not t.is_cuda:
                raise RuntimeError("No backend type associated with device type cpu")
            if not t.is_contiguous():
                raise ValueError(f"{kind}: tensors must be contiguous, got strides {t.stride()}")
            if t.dtype not in _NCCL_DTYPES:
                raise TypeError(f"{kind}: NCCL has no dtype {t.dtype}")
        if len({t.device for t in tensors}) > 1 or len({t.dtype for t in tensors}) > 1:
            raise ValueError(f"{kind}: tensors of several devices or dtypes")
        if kind == "gather" and len({t.shape for t in tensors}) > 1:
            raise ValueError(f"{kind}: tensors of several shapes")
        self.collectives[kind] += 1


def _value(t: Tensor) -> float | bool:
    """What the host reads: 1 of a step count or a norm, say, and no overflow of a gradient."""
    if t.dtype == torch.bool:
        return False
    names, frame = [], sys._getframe(2)
    while frame is not None and len(names) < 6:
        names.append(frame.f_code.co_filename)
        frame = frame.f_back
    found_inf = any(name.endswith("grad_scaler.py") for name in names)
    value = 0.0 if found_inf else 1.0
    return value if t.dtype.is_floating_point else int(value)


def _site() -> str:
    """The innermost line of the product on the stack."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OURS):
            path = Path(frame.f_code.co_filename).relative_to(Path(__file__).parents[2])
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


# ---- kernels that the CPU build lacks ------------------------------------------------------------


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Any:
    stats = x.shape[: x.dim() - len(shape)] + (1,) * len(shape)
    return torch.empty_like(x), x.new_empty(stats, dtype=torch.float32)


def _rms_norm_backward(
    grad: Tensor, x: Tensor, shape: list[int], rstd: Tensor, weight: Tensor | None, mask: list[bool]
) -> Any:
    return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


_KERNELS: dict[str, Callable[..., Any]] = {
    "aten::_fused_rms_norm": _rms_norm,
    "aten::_fused_rms_norm_backward": _rms_norm_backward,
    "aten::_fused_adamw_": lambda *args, **kwargs: None,
}
_kernels = torch.library.Library("aten", "IMPL")
_kernels.impl("_fused_rms_norm", _rms_norm, "CUDA")
_kernels.impl("_fused_rms_norm_backward", _rms_norm_backward, "CUDA")

# ---- torch's own questions after the device ------------------------------------------------------


class Event:
    """A CUDA event that is always over."""

    def __init__(self, enable_timing: bool = False, **rest: Any) -> None:
        if FakeGPU.current is not None and enable_timing:
            FakeGPU.current.timing_events += 1

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _synchronize()

    def elapsed_time(self, other: Event) -> float:
        return 1.0


def _synchronize(*device: Any) -> None:
    if FakeGPU.current is not None:
        FakeGPU.current.waits("synchronize")


_PROPERTIES = types.SimpleNamespace(
    name="fake", multi_processor_count=132, major=9, minor=0, total_memory=141 * 10**9
)

_ANSWERS: dict[str, Any] = {
    "is_available": True, "device_count": 1, "current_device": 0, "is_initialized": True,
    "_lazy_init": None, "set_device": None, "empty_cache": None, "get_device_name": "fake",
    "get_device_properties": _PROPERTIES, "get_device_capability": (9, 0),
    "memory_allocated": 2**30, "max_memory_allocated": 2**30, "max_memory_reserved": 2**30,
    "reset_peak_memory_stats": None, "is_current_stream_capturing": False,
}  # fmt: skip


def _answering(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _numpy(self: Tensor, *args: Any) -> Any:
    """Ones: cells that were counted, areas, predictions."""
    if self.is_cuda:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")
    return np.ones(tuple(self.shape), str(self.dtype).removeprefix("torch."))


def _tolist(self: Tensor) -> Any:
    """Zeros: no votes for a stop, no rank that is the culprit."""
    return np.zeros_like(self.to("cpu").numpy()).tolist()


_from_numpy = torch.from_numpy


def _fake_from_numpy(array: np.ndarray) -> Tensor:
    t = _from_numpy(array)
    faked = torch._C._len_torch_dispatch_stack()  # of this thread: a loader's has none
    return torch.empty(t.shape, dtype=t.dtype) if faked else t


def _apply(self: torch.nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """Exchange a module's tensors when it moves; fake ones can't be overwritten."""
    for module in self.modules():
        for name, p in module._parameters.items():
            if p is not None:
                moved = torch.nn.Parameter(fn(p.detach()), requires_grad=p.requires_grad)
                module._parameters[name] = moved
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else fn(buffer)
    return self


def _loading(load: Callable[..., Any]) -> Callable[..., Any]:
    """Read a file's real tensors, and fake them where they go."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        place = {name: kwargs.pop(name) for name in ("device", "map_location") if name in kwargs}
        with _disable_current_modes():
            found = load(*args, **kwargs)
        device = next(iter(place.values()), "cpu")
        return tree_map_only(Tensor, lambda t: t.to(device, copy=True), found)

    return wrapped


def _install() -> None:
    for name, value in _ANSWERS.items():
        setattr(torch.cuda, name, _answering(value))
    torch.cuda.Event = Event
    torch.cuda.synchronize = _synchronize
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch._C._set_only_lift_cpu_tensors(True)  # values that go to the device pass the modes
    torch.from_numpy = _fake_from_numpy
    torch.load, safetensors.torch.load_file = map(
        _loading, (torch.load, safetensors.torch.load_file)
    )
    FakeTensor.numpy = FakeTensor.__array__ = _numpy
    FakeTensor.tolist = _tolist
    torch.nn.Module._apply = _apply
    # What torch does with many tensors at once where their type is its own.
    optimizer._foreach_supported_types.append(FakeTensor)
    clip_grad._has_foreach_support = foreach_utils._has_foreach_support = lambda tensors, device: (
        device.type in ("cuda", "cpu")
    )


_install()


def start_group(rank: int, world_size: int) -> None:
    """Become one rank of a group whose messages go nowhere."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
