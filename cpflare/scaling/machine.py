"""What a measurement ran on: processor, accelerators and versions, for the record of a result."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch


def describe_machine() -> dict[str, Any]:
    """Processor, accelerators and versions."""
    machine: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        machine["gpus"] = [
            torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
        ]
        machine["cuda"] = torch.version.cuda
    return machine


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The first processor that Linux lists in `cpuinfo`, with its generation where it tells.

    Virtual machines call several generations by one name ("AMD EPYC").
    """
    # Other systems have no such file, processors of other kinds no such lines.
    first = cpuinfo.read_text().split("\n\n")[0] if cpuinfo.exists() else ""
    fields = (line.partition(":") for line in first.splitlines())
    values = {key.strip(): value.strip() for key, _, value in fields}
    name = values.get("model name") or platform.processor() or platform.machine()
    keys = ("cpu family", "model", "stepping", "CPU part")
    generation = [f"{key.removeprefix('cpu ')} {values[key]}" for key in keys if key in values]
    return f"{name} ({', '.join(generation)})" if generation else name
