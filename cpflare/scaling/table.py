"""A study's figures as CSV, as markdown, and as the cells of a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict

from cpflare.scaling.efficiency import Row, summarise
from cpflare.scaling.study import Study


def to_csv(rows: Sequence[Row]) -> str:
    """All figures of all points, one point a line."""
    out = io.StringIO()
    writer: csv.DictWriter[str] | None = None
    for row in rows:
        values = {**asdict(row.point), **asdict(row), "data_free_s": row.data_free_s}
        values["overrides"] = " ".join(row.point.overrides)
        del values["point"]
        if writer is None:
            writer = csv.DictWriter(out, list(values), lineterminator="\n")
            writer.writeheader()
        writer.writerow(values)
    return out.getvalue()


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the table that people read."""
    header = ["model", "cells", "ranks", "how", "network", "step [s]", "quartiles [s]"]
    header += [
        "data",
        "compute",
        "comm",
        "time eff.",
        "paired",
        "work eff.",
        "of separate",
        "peak [MiB]",
        "memory eff.",
    ]
    header += ["messages", "sent [KiB]", "theory [KiB]"]
    return header, [_cells(row) for row in rows]


def to_text(rows: Sequence[Row]) -> str:
    """The same table for a terminal."""
    header, cells = table(rows)
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    return "\n".join(
        "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True))
        for line in (header, *cells)
    )


def _cells(row: Row) -> list[str]:
    point = row.point
    how = point.method if point.executor == "in_memory" else f"{point.method}, {point.executor}"
    if point.precision != "fp32":
        how += f", {point.precision}"
    return [
        point.model,
        f"{point.tokens:,}",
        str(point.ranks),
        how,
        point.link,
        f"{row.step_s:.3f}",
        f"{row.step_q1_s:.3f}–{row.step_q3_s:.3f}",
        f"{row.data_s:.3f}",
        f"{row.compute_s:.3f}",
        f"{row.comm_s:.3f}",
        _share(row.time_efficiency),
        _share(row.paired_time_efficiency, without="–"),
        _share(row.work_efficiency, without="–"),
        _share(row.of_separate, without="–"),
        f"{row.peak_bytes / 2**20:,.0f}",
        _share(row.memory_efficiency),
        str(row.messages),
        f"{row.sent_bytes / 2**10:,.0f}",
        "–" if row.theory_bytes is None else f"{row.theory_bytes / 2**10:,.0f}",
    ]


def reading_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]] | None:
    """Header and cells of what reading costs, for the points of a store; None without any."""
    header = [
        "model",
        "cells",
        "ranks",
        "read by a rank [cells/s]",
        "step [s]",
        "waits for data [s]",
    ]
    header.append("step with data free [s]")
    cells = [
        [
            row.point.model,
            f"{row.point.tokens:,}",
            str(row.point.ranks),
            f"{row.read_cells_per_s:,.0f}",
            f"{row.step_s:.4f}",
            f"{row.data_s:.4f}",
            f"{row.data_free_s:.4f}",
        ]
        for row in rows
        if row.read_cells_per_s is not None
    ]
    return (header, cells) if cells else None


def _share(value: float | None, without: str = "no single rank") -> str:
    return without if value is None else f"{value:.3f}"


def to_markdown(study: Study) -> str:
    """The study as a page: what was measured on what, and the table."""
    header, cells = table(summarise(study))
    lines = [f"# {study.title}", "", *[f"- {line}" for line in describe(study)], ""]
    lines.append("| " + " | ".join(header) + " |")
    lines.append("|" + "|".join(" :-- " if i < 5 else " --: " for i in range(len(header))) + "|")
    lines += ["| " + " | ".join(row) + " |" for row in cells]
    reading = reading_table(summarise(study))
    if reading is not None:
        lines += ["", "| " + " | ".join(reading[0]) + " |", "|" + " --: |" * len(reading[0])]
        lines += ["| " + " | ".join(row) + " |" for row in reading[1]]
    lines += ["", *NOTES]
    return "\n".join(lines) + "\n"


NOTES = (
    "Seconds are medians over the timed steps, each to its slowest rank between barriers, warm-up "
    "left out; a DDP step trains one case a rank and is divided by the ranks. Time efficiency is "
    "T1 / (R TR), memory efficiency M1 / (R MR), against the single rank of the same model in this "
    "study; *paired* is the median of that ratio over the rounds, *work* the same of the ranks' "
    "processor time, which a busy machine changes little. *Of separate* is the step of as many "
    "ranks that do the same work and exchange nothing, over this one: it leaves out what "
    "processors of one machine take from one another. Communication includes waiting for the other "
    "ranks. Theory: HM(D+2) values an encoder forward, HMD backward, each gradient once.",
)


def describe(study: Study) -> list[str]:
    """Machine, versions, threads, date and protocol, a line each."""
    machine, protocol = study.machine, study.protocol
    memory = f"{machine['memory_bytes'] / 2**30:.0f} GiB"
    devices = ", ".join(machine.get("gpus", ())) or f"{machine['cpu']}, {machine['cores']} cores"
    order = (
        "points of a family in turns, every other round backwards"
        if protocol["alternate"]
        else "each point by itself"
    )
    on_gpu = bool(machine.get("gpus"))
    kind = "allocated on the GPU" if on_gpu else "resident above the idle process"
    allocator = protocol.get("allocator")
    loads = [record["load_before"] for record in study.records.values()]
    lines = [
        f"measured {study.date} on {devices}, {memory}, {machine['system']}",
        f"torch {machine['torch']}, Python {machine['python']}, {protocol['threads']} thread(s) a "
        "rank" + (f", GLIBC_TUNABLES={allocator}" if allocator else ""),
        f"{protocol['rounds']} rounds of {protocol['steps']} step(s) after {protocol['warmup']} to "
        f"warm up; {order}",
        f"data: {protocol['data']}; load of the machine before: "
        f"{min(loads, default=0.0):.1f} to {max(loads, default=0.0):.1f}",
        f"memory: {kind} (after imports and the process group's start), largest rank",
    ]
    if "noise_limit" in protocol:
        lines.append(_noise(study))
    trips = sorted({f"{row.round_trip_ms:.2f}" for row in summarise(study) if row.round_trip_ms})
    if trips:
        lines.append(f"measured round trips between the two hosts: {', '.join(trips)} ms")
    if study.command:
        lines.append(f"command: {study.command}")
    return lines


def _noise(study: Study) -> str:
    """How quiet the machine was found to be, and how often it was not."""
    limit = study.protocol["noise_limit"]
    records = list(study.records.values())
    kept = [max(sample["noise"]) for record in records for sample in record["samples"]]
    aside = sum(len(record["set_aside"]) for record in records)
    loud = sum(noise > limit for noise in kept)
    return (
        f"noise, by how much a probe of the processors took longer than its fastest: at most "
        f"{limit:.0%} before and after a step, else it was set aside ({aside} step(s)) and taken "
        f"again; {loud} of {len(kept)} steps count with more, when patience had run out"
    )
