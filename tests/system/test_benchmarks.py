"""Long measurements: what is measured is kept when the rest is cut off."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import gpu


def test_a_measurement_of_a_device_is_saved_after_each_point(tmp_path, monkeypatch):
    measured = []

    def measure_network(device, name, *rest):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(name)
        return {"first_step_s": 1.0, "forward_s": 1.0, "step_s": 2.0, "peak_bytes": 0}

    monkeypatch.setattr(gpu, "measure_network", measure_network)
    monkeypatch.setattr(gpu, "MeasuredDevice", Device)
    monkeypatch.setattr(gpu, "measure_attention", lambda *shape: {})
    networks = [(name, None) for name in ("plain, compiled", "in memory", "streamed")]
    monkeypatch.setattr(gpu, "networks", lambda *shape: iter(networks))
    arguments = ["--device", "cpu", "--tokens", "20", "--precisions", "fp32", "--out"]
    monkeypatch.setattr(sys, "argv", ["gpu", *arguments, str(tmp_path)])
    with pytest.raises(KeyboardInterrupt):
        gpu.main()
    (point,) = json.loads((tmp_path / "cpu.json").read_text())["points"]
    assert list(point["steps"]) == measured == ["plain, compiled", "in memory"]
    assert "in memory | 1000.0 ms | 2000.0 ms" in (tmp_path / "cpu.md").read_text()


class Device:
    bandwidth, rates = 1e9, {"fp32": 1e12}

    def __init__(self, device, runs):
        pass
