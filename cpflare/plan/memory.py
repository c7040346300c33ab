"""What to change where a step does not fit into memory, with a plan's figures."""

from __future__ import annotations

import dataclasses

from cpflare.config import Config
from cpflare.plan.devices import DEVICES, LINKS
from cpflare.plan.planner import Planner, make_planner, powers_of_two


def memory_mend(config: Config, cells: int, ranks: int, total_bytes: float) -> str:
    """What fits a case of `cells` cells into ranks of a GPU's memory, as a message ends.

    The executor, its chunk, more ranks a case, and fewer cells: each where it suffices by itself.
    """
    planner = _planner(config, total_bytes)
    mends = []
    streamed = config
    if config.engine.executor != "streamed":
        engine = dataclasses.replace(config.engine, executor="streamed", chunk_tokens=None)
        streamed = dataclasses.replace(config, engine=engine)
        found = _planner(streamed, total_bytes).predict(cells, ranks)
        if planner.fits(found):
            mends.append(f"engine.executor=streamed ({_gib(found.memory_bytes)})")
    else:
        now, chunk = planner.predict(cells, ranks), planner.largest_chunk(cells, ranks)
        if chunk is not None and chunk < now.chunk:
            held = planner.predict(cells, ranks, chunk).memory_bytes
            mends.append(f"engine.chunk_tokens={chunk} ({_gib(held)})")
    more = next((n for n in powers_of_two(1024) if n > ranks and _fits(planner, cells, n)), None)
    if more is not None:
        held = planner.predict(cells, more).memory_bytes
        mends.append(f"{more} ranks a case ({_gib(held)} each)")
    fewer = _most_cells(planner, cells, ranks)
    if fewer:
        held = planner.predict(fewer, ranks).memory_bytes
        mends.append(f"data.tokens={fewer} ({_gib(held)})")
    estimate = planner.predict(cells, ranks).memory_bytes
    if not mends:
        return f"{_gib(estimate)} are estimated; a smaller model, or a GPU with more memory"
    return f"{_gib(estimate)} are estimated; what would fit: {', or '.join(mends)}"


def _planner(config: Config, total_bytes: float) -> Planner:
    # Memory alone is asked for, which does not depend on how fast a device is.
    device = dataclasses.replace(DEVICES["h100"], memory_bytes=total_bytes)
    return make_planner(config, device, LINKS["infiniband"])


def _fits(planner: Planner, cells: int, ranks: int) -> bool:
    return planner.fits(planner.predict(cells, ranks))


def _most_cells(planner: Planner, cells: int, ranks: int) -> int:
    """The most cells that fit, to two digits; 0 where it is none, or what there is now."""
    lowest, highest = 0, cells
    while highest - lowest > 1:
        middle = (lowest + highest) // 2
        lowest, highest = (middle, highest) if _fits(planner, middle, ranks) else (lowest, middle)
    unit = 10 ** max(len(str(lowest)) - 2, 0)
    return lowest // unit * unit if lowest < cells - 1 else 0


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"
