"""The executors beside plain PyTorch: step time and peak memory of the same network.

Every variant runs in a process of its own and takes its steps in turn with the others; the
plain one imports nothing of the package. All keep their heap (glibc's tunables below): otherwise
large tensors are mapped and faulted anew at each allocation, which costs the plain one, whose
tensors are the largest, half of its time.

python -m benchmarks.executors                 the full table: 100,000 tokens, C = 128, 8 blocks
python -m benchmarks.executors --compile       compiled against compiled
python -m benchmarks.executors --tokens 5000 --channels 32 --blocks 2 --runs 1
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.results import origin, write_result

VARIANTS = ("plain", "in_memory", "streamed")
FEATURES, OUTPUTS, HEADS = 6, 4, 8
SAME = 1e-5
LIMITS = {
    "streamed": {"time": 1.35, "memory": 0.12},
    "in_memory": {"time": 1.0, "memory": 0.7},
}
KEEP_HEAP = {"MALLOC_MMAP_THRESHOLD_": str(2**33), "MALLOC_TRIM_THRESHOLD_": str(2**34)}


def serve(connection: Connection, variant: str, options: argparse.Namespace) -> None:
    """One variant's process: builds the network and takes a step whenever it is asked to."""
    import torch

    from benchmarks.memory import peak_bytes, reset_peak, resident_bytes

    torch.set_num_threads(options.threads)
    make = _plain if variant == "plain" else _load_ours()
    idle = resident_bytes()
    reset_peak()
    model = make(variant, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand(1, options.tokens, FEATURES, generator=generator)
    targets = torch.randn(1, options.tokens, OUTPUTS, generator=generator)
    connection.send({"idle": idle, "parameters": sum(p.numel() for p in model.parameters())})
    while connection.recv() is not None:
        start, used = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        outputs = model(inputs)
        forward = time.perf_counter() - start
        loss = (outputs - targets).square().mean()
        loss.backward()
        optimizer.step()
        seconds, used = time.perf_counter() - start, time.process_time() - used
        sample = outputs.detach()[0, :: max(options.tokens // 1000, 1)].clone()
        loss_value = float(loss.detach())
        del outputs, loss
        answer = {"seconds": seconds, "used": used, "forward": forward, "loss": loss_value}
        connection.send(answer | {"peak": peak_bytes() - idle, "sample": sample.numpy()})


def _plain(variant: str, options: argparse.Namespace) -> Any:
    import torch

    model = _seeded(options)
    return torch.compile(model) if options.compile else model


def _seeded(options: argparse.Namespace) -> Any:
    """The plain network with the same weights in every process."""
    import torch

    from benchmarks.plain_pytorch import PlainFlarePP

    sizes = {"width": options.channels, "latents": options.latents, "blocks": options.blocks}
    model = PlainFlarePP(FEATURES, OUTPUTS, heads=HEADS, **sizes)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate_logit"):
                parameter.fill_(0.25)
            elif "norm" not in name and not name.startswith("out_proj.0"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
            if name.split(".")[-2] in ("k0_proj", "k_proj", "v_proj") and parameter.ndim == 2:
                parameter.add_(torch.eye(options.channels))
    return model


def _load_ours() -> Callable[[str, argparse.Namespace], Any]:
    from cpflare.config import config_from_dict
    from cpflare.engine import configure
    from cpflare.models import build_model
    from cpflare.models.published import load_published

    def make(variant: str, options: argparse.Namespace) -> Any:
        sizes = {"channels": options.channels, "heads": HEADS, "latents": options.latents}
        engine = {"executor": variant, "chunk_tokens": options.chunk_tokens}
        if options.compile:
            engine["compile"] = True
        config = config_from_dict(
            {"model": {**sizes, "mixer": "flarepp", "blocks": options.blocks}, "engine": engine}
        )
        model = build_model(config)
        load_published(model, _seeded(options).state_dict())
        return configure(model, config.engine)

    return make


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Steps of all variants in turn; the first of each warms it up and is compared."""
    context = multiprocessing.get_context("spawn")
    workers: dict[str, Connection] = {}
    processes = []
    results: dict[str, Any] = {}
    for variant in options.variants:
        workers[variant], theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, variant, options), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        empty: dict[str, list[float]] = {"seconds": [], "used": [], "forward": [], "losses": []}
        results[variant] = {**workers[variant].recv(), **empty}
    samples: dict[str, list[Any]] = {variant: [] for variant in options.variants}
    for run in range(options.runs + 1):
        # The order turns, so that nobody always follows the same one.
        turn = run % len(options.variants)
        for variant in options.variants[turn:] + options.variants[:turn]:
            workers[variant].send("step")
            answer = workers[variant].recv()
            result = results[variant]
            result["losses"].append(answer["loss"])
            result["peak"] = answer["peak"]
            samples[variant].append(answer["sample"])
            if run == 0:
                result["first_s"] = answer["seconds"]
            else:
                for key in ("seconds", "used", "forward"):
                    result[key].append(answer[key])
            print(f"run {run} {variant}: {answer['seconds']:.2f} s", file=sys.stderr, flush=True)
    for connection in workers.values():
        connection.send(None)
    for process in processes:
        process.join()
    for variant, result in results.items():
        result["median_s"] = statistics.median(result["seconds"])
        result["median_used_s"] = statistics.median(result["used"])
        result["median_forward_s"] = statistics.median(result["forward"])
        reference = options.variants[0]
        result["error"] = _error(samples[variant][0], samples[reference][0])
        result["error_after_a_step"] = _error(samples[variant][1], samples[reference][1])
        # Equal outputs before and after an update: the gradients are the same as well.
        assert result["error"] < SAME, (variant, result["error"])
    return results


def _error(found: Any, expected: Any) -> float:
    return float(abs(found - expected).max() / abs(expected).max())


def describe(record: dict[str, Any]) -> str:
    """The result as markdown."""
    sizes, results, machine = record["sizes"], record["results"], record["machine"]
    plain = results.get("plain")
    bound = (sizes["blocks"] + 3) * 4 * sizes["tokens"] * sizes["channels"] + 300e6
    compiled, runs = sizes["compile"], len(next(iter(results.values()))["seconds"])
    heap = "" if sizes.get("default_heap", True) else " that keeps its heap"
    lines = [
        f"# Executors beside plain PyTorch{', all compiled' if compiled else ''}",
        "",
        f"FLARE++, N = {sizes['tokens']:,}, C = {sizes['channels']}, {sizes['blocks']} blocks, "
        f"M = {sizes['latents']}, H = {HEADS}, fp32, one rank, {sizes['threads']} threads. A step "
        f"is forward, backward and AdamW; medians of {runs} runs in turn, each variant in a "
        f"process of its own{heap}; memory is the peak of the resident set above the idle process "
        "after its imports.",
        "",
        "| variant | step | of plain | limit | processor time | of plain | forward | peak memory | "
        "of plain | limit | first step | outputs differ by |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for variant, result in results.items():
        limit = LIMITS.get(variant, {}) if not compiled else {}
        ratios = dict.fromkeys(("median_s", "median_used_s", "peak"), "")
        if plain is not None:
            ratios = {key: f"{result[key] / plain[key]:.3f}" for key in ratios}
        lines.append(
            f"| {variant.replace('_', ' ')} | {result['median_s']:.2f} s | "
            f"{ratios['median_s']} | {limit.get('time', '')} | {result['median_used_s']:.2f} s | "
            f"{ratios['median_used_s']} | {result['median_forward_s']:.2f} s | "
            f"{result['peak'] / 1e6:,.0f} MB | {ratios['peak']} | {limit.get('memory', '')} | "
            f"{result['first_s']:.2f} s | {result['error']:.1e} |"
        )
    lines += [
        "",
        f"(blocks + 3)·4·N·C bytes + 300 MB = {bound / 1e6:,.0f} MB.",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"Python {machine['python']}, torch {machine['torch']}, {record['date']}. "
        f"{record['note']}".strip(),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, write and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("tokens", 100_000), ("channels", 128), ("blocks", 8), ("latents", 64), ("threads", 2),
        ("runs", 5),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--chunk-tokens", type=int, help="of our executors (default: theirs)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--compile", action="store_true", help="compile all of them")
    parser.add_argument(
        "--default-heap", action="store_true", help="as glibc has it without tunables"
    )
    parser.add_argument("--out", type=Path, default=Path("studies/executors"))
    parser.add_argument("--note", default="", help="a sentence for the record")
    options = parser.parse_args()
    if not options.default_heap:
        os.environ.update(KEEP_HEAP)  # the processes that are measured take it over
    results = measure(options)
    names = ("tokens", "channels", "blocks", "latents", "threads", "compile", "chunk_tokens")
    record = {
        "sizes": {name: getattr(options, name) for name in (*names, "default_heap")},
        "results": results,
        **origin(),
        "note": options.note,
    }
    write_result(options.out, "compiled" if options.compile else "eager", record, describe)


if __name__ == "__main__":
    main()
