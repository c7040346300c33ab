"""One device beside compiled plain PyTorch: encoder and decoder by themselves, and whole steps.

Times are medians between CUDA events; the floor of each operation is what the bytes and operations
that it must move and do take at the bandwidth and rate that a copy and a matrix product reach on
the same device.

python -m benchmarks.gpu                           the whole table, on one GPU
python -m benchmarks.gpu --device cpu --tokens 2000 --latents 8 --channels 16 --blocks 1 --runs 1
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.device import DTYPES, MeasuredDevice
from benchmarks.plain_pytorch import PlainFlarePP
from benchmarks.results import origin, save_result, write_result
from cpflare.config import EngineConfig, config_from_dict
from cpflare.engine import configure
from cpflare.models import build_model
from cpflare.models.published import load_published
from cpflare.ops.attention import attend, attend_backward, statistics_dtype

HEADS, FEATURES, OUTPUTS = 8, 6, 4
# Outputs of a whole network, whose kernels differ: TF32 products and fp16 roundings.
SAME = {"fp16": 3e-2, "fp32": 1e-3}


@dataclasses.dataclass(frozen=True)
class Work:
    """What an operation must move and do: N-sized tensors read and written, matrix products."""

    tensors: int
    products: int


# Forward: two tensors and two products. Backward: the encoder reads K, V and writes dK, dV; the
# decoder reads K, Y, dY and writes dK; both form five products.
WORK = {
    "encoder forward": Work(2, 2),
    "encoder backward": Work(4, 5),
    "decoder forward": Work(2, 2),
    "decoder backward": Work(4, 5),
}


def measure_attention(
    measured: MeasuredDevice, precision: str, tokens: int, latents: int, channels: int
) -> dict[str, Any]:
    """Encoder and decoder, forward and backward: ours, plain's, and the floor."""
    dtype, depth = DTYPES[precision], channels // HEADS
    scale = depth**-0.5

    def heads(rows: int) -> Tensor:
        """[1, H, rows, D] as a projection leaves it."""
        t = torch.randn(1, rows, HEADS, depth, device=measured.device, dtype=dtype)
        return t.transpose(1, 2)

    q, dz, k, v, dy = heads(latents), heads(latents), heads(tokens), heads(tokens), heads(tokens)
    z, lse = attend(q, k, v, scale=scale)
    y, lse_y = attend(k, q, z, scale=scale)
    stats = statistics_dtype(dtype)
    ours: dict[str, Callable[[], object]] = {
        "encoder forward": lambda: attend(q, k, v, scale=scale),
        "encoder backward": lambda: attend_backward(dz, q, k, v, z.to(stats), lse, scale=scale),
        "decoder forward": lambda: attend(k, q, z, scale=scale),
        "decoder backward": lambda: attend_backward(dy, k, q, z, y, lse_y, scale=scale),
    }
    plain = plain_attention(q, k, v, z, dz, dy)
    results = {}
    for name, work in WORK.items():
        num_bytes = work.tensors * tokens * channels * dtype.itemsize
        operations = 2 * work.products * tokens * latents * channels
        floor = max(num_bytes / measured.bandwidth, operations / measured.rate(precision))
        seconds = measured.seconds(ours[name])
        results[name] = {
            "seconds": seconds,
            "plain_seconds": measured.seconds(plain[name]),
            "floor_seconds": floor,
            "times_floor": seconds / floor,
        }
    return results


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, z: Tensor, dz: Tensor, dy: Tensor
) -> dict[str, Callable[[], object]]:
    """The same four by `scaled_dot_product_attention` and its autograd."""
    leaves = {name: t.detach().requires_grad_() for name, t in (("q", q), ("k", k), ("v", v))}
    latents = z.detach().requires_grad_()
    encoded = F.scaled_dot_product_attention(leaves["q"], leaves["k"], leaves["v"])
    decoded = F.scaled_dot_product_attention(leaves["k"], leaves["q"], latents)

    def forward(a: Tensor, b: Tensor, c: Tensor) -> Callable[[], object]:
        return lambda: F.scaled_dot_product_attention(a, b, c)

    def backward(out: Tensor, inputs: tuple[Tensor, ...], grad: Tensor) -> Callable[[], object]:
        return lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)

    return {
        "encoder forward": forward(q, k, v),
        "encoder backward": backward(encoded, tuple(leaves.values()), dz),
        "decoder forward": forward(k, q, z),
        "decoder backward": backward(decoded, (leaves["k"], leaves["q"], latents), dy),
    }


def networks(
    precision: str, latents: int, channels: int, blocks: int, device: torch.device
) -> Iterator[tuple[str, nn.Module]]:
    """The same network in each way of running it, one after another."""
    sizes = {"width": channels, "heads": HEADS, "latents": latents, "blocks": blocks}
    torch.manual_seed(0)
    plain = PlainFlarePP(FEATURES, OUTPUTS, **sizes)
    for parameter in plain.parameters():
        if parameter.ndim > 1 or not parameter.isfinite().all():
            nn.init.normal_(parameter, std=0.05)
    for block in plain.blocks:
        nn.init.constant_(block.mixer.gate_logit, 0.25)  # type: ignore[union-attr, arg-type]
    state = plain.state_dict()
    yield "plain, compiled", torch.compile(plain.to(device))  # type: ignore[misc]
    del plain
    model = {"mixer": "flarepp", "channels": channels, "heads": HEADS, "latents": latents}
    can_compile = "compile" in {field.name for field in dataclasses.fields(EngineConfig)}
    engines: dict[str, dict[str, Any]] = {
        "in memory": {},
        "streamed": {"executor": "streamed"},
        "streamed, host": {"executor": "streamed", "offload": "host"},
    }
    if can_compile:
        engines |= {
            f"{name}, compiled": {**engine, "compile": True} for name, engine in engines.items()
        }
    for name, engine in engines.items():
        config = config_from_dict(
            {"model": {**model, "blocks": blocks, "norm": "layernorm"}, "engine": engine}
        )
        ours = build_model(config)
        load_published(ours, {key: value.cpu() for key, value in state.items()})
        yield name, configure(ours.to(device), config.engine)


def measure_network(
    measured: MeasuredDevice, name: str, model: nn.Module, precision: str, inputs: Tensor
) -> dict[str, Any]:
    """Forward and step times, the first step's, peak memory, and a sample of the outputs."""
    device = measured.device
    autocast = torch.autocast(device.type, torch.float16) if precision == "fp16" else nullcontext()
    targets = torch.zeros(*inputs.shape[:2], OUTPUTS, device=device)

    def forward() -> Tensor:
        with autocast:
            out: Tensor = model(inputs)
        return out

    def step() -> None:
        model.zero_grad()
        ((forward().float() - targets).square().mean() * 1024).backward()

    try:
        measured.reset_peak()
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        first = time.perf_counter() - start
        peak = measured.peak()
        with torch.no_grad():
            sample = forward()[0, :1000].float().cpu()
            forward_s = measured.seconds(forward)
        return {
            "first_step_s": first,
            "forward_s": forward_s,
            "step_s": measured.seconds(step),
            "peak_bytes": peak,
            "sample": sample,
        }
    except torch.cuda.OutOfMemoryError:
        return {"out_of_memory": True}


def measure(options: argparse.Namespace, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """All points of the table; `save` gets what there is of it after each one."""
    device = torch.device(options.device)
    measured = MeasuredDevice(device, options.runs)
    points: list[dict[str, Any]] = []
    record = {
        "bandwidth": measured.bandwidth,
        "rates": measured.rates,
        "points": points,
        "channels": options.channels,
        "blocks": options.blocks,
    }
    for precision in options.precisions:
        for latents in options.latents:
            for tokens in options.tokens:
                shape = {"precision": precision, "latents": latents, "tokens": tokens}
                print(shape, flush=True)
                attention = measure_attention(
                    measured, precision, tokens, latents, options.channels
                )
                inputs = torch.rand(1, tokens, FEATURES, device=device)
                steps: dict[str, Any] = {}
                points.append({**shape, "attention": attention, "steps": steps})
                save(record)
                reference = None
                for name, model in networks(
                    precision, latents, options.channels, options.blocks, device
                ):
                    result = measure_network(measured, name, model, precision, inputs)
                    sample = result.pop("sample", None)
                    reference = sample if name == "plain, compiled" else reference
                    if sample is not None and reference is not None:
                        error = float((sample - reference).abs().max() / reference.abs().max())
                        result["error"] = error
                        assert error < SAME[precision], (shape, name, error)
                    steps[name] = result
                    print(f"  {name}: {result}", flush=True)
                    save(record)
                    del model
                    torch.compiler.reset()
    return record


def describe(record: dict[str, Any]) -> str:
    """The result as markdown."""
    lines = [
        f"# {record['device']}",
        "",
        f"FLARE++, C = {record['channels']}, H = {HEADS}, {record['blocks']} blocks, one device; "
        f"a copy reaches {record['bandwidth'] / 1e9:,.0f} GB/s, a matrix product "
        + ", ".join(
            f"{rate / 1e12:,.1f} TFLOP/s in {name}" for name, rate in record["rates"].items()
        )
        + ".",
        "",
        "| precision | M | N | operation | ours | plain | floor | times the floor |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for point in record["points"]:
        shape = f"| {point['precision']} | {point['latents']} | {point['tokens']:,} |"
        for name, one in point["attention"].items():
            lines.append(
                f"{shape} {name} | {one['seconds'] * 1e3:.3f} ms | "
                f"{one['plain_seconds'] * 1e3:.3f} ms | {one['floor_seconds'] * 1e3:.3f} ms | "
                f"{one['times_floor']:.1f} |"
            )
    lines += [
        "",
        "| precision | M | N | network | forward | step | first step | peak memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for point in record["points"]:
        shape = f"| {point['precision']} | {point['latents']} | {point['tokens']:,} |"
        for name, one in point["steps"].items():
            if one.get("out_of_memory"):
                lines.append(f"{shape} {name} | out of memory | | | |")
                continue
            peak = f"{one['peak_bytes'] / 2**30:.2f} GiB" if one["peak_bytes"] else ""
            lines.append(
                f"{shape} {name} | {one['forward_s'] * 1e3:.1f} ms | "
                f"{one['step_s'] * 1e3:.1f} ms | {one['first_step_s']:.1f} s | {peak} |"
            )
    lines += ["", f"torch {record['machine']['torch']}, {record['date']}.", ""]
    return "\n".join(lines)


def main() -> None:
    """Measure, write and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precisions", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--latents", type=int, nargs="+", default=[64])
    parser.add_argument("--tokens", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--channels", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("studies/gpu"))
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device is here; --device cpu tries the script")
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    about, file = {"device": name, **origin()}, name.lower().replace(" ", "_")
    record = measure(
        options, lambda record: save_result(options.out, file, {**record, **about}, describe)
    )
    write_result(options.out, file, {**record, **about}, describe)


if __name__ == "__main__":
    main()
