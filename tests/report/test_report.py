"""The report: self-contained, escaped, tolerant of what is missing, and its pictures honest."""

from __future__ import annotations

import json
import os
import re
import struct
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
import yaml

from cpflare.errors import DataError
from cpflare.evaluate.export import write_vtp
from cpflare.report import plots
from cpflare.report.curves import draw_curve, draw_evaluations, read_history, thin_out
from cpflare.report.html import write_report
from cpflare.report.plots import (
    _columns,
    _to_source,
    draw_parity,
    fields_to_draw,
    render_comparison,
)

pv = pytest.importorskip("pyvista")

FIELD_MAP = {
    "association": "cell",
    "fields": {"pressure": {"names": ["pMeanTrim"]}, "wall_shear": {"names": ["tau"]}},
    "units": {"pressure": "m2/s2"},
}
METRICS = {
    "cases": {
        f"run_{i}": {
            "pressure": {"rel_l2": 0.1 * i, "rel_l2_area": 0.1, "mae": 3.25, "rmse": 4.5},
            "forces": {"Cd": {"pred": 0.3 + 0.01 * i, "true": 0.3 + 0.02 * i}},
        }
        for i in (1, 2)
    },
    "mean": {"pressure": {"rel_l2": 0.1525, "rel_l2_area": 0.1, "mae": 3.25, "rmse": 4.5}},
    "forces": {"Cd": {"mae": 0.0151, "r2": None}},
    "units": {"pressure": "m2/s2"},
    "notices": ["a <b>notice</b>"],
}


def step(number, **more):
    values = {
        "step": number,
        "epoch": 0,
        "cases": ["run_1"],
        "loss": 1.0 / number,
        "grad_norm": 0.5,
        "lr": 1e-3,
        "tokens": 1000,
        "step_s": 0.5,
        "data_s": 0.01,
        "comm_s": 0.02,
        "tokens_per_s": 2000.0,
        "peak_mem_bytes": 3 * 2**30,
    }
    return json.dumps(values | more)


def write_run(folder, lines=None, **config):
    folder.mkdir(parents=True)
    content = {
        "data": {"store": "data/store", "tokens": 100_000},
        "model": {"mixer": "flarepp", "channels": 128, "heads": 8, "blocks": 4, "latents": 64},
        "train": {"steps": 3, "loss": "mse", "lr": 1e-3},
        **config,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    if lines is None:
        lines = [
            *(step(number) for number in (1, 2, 3)),
            json.dumps({"kind": "eval", "step": 2, "pressure_rel_l2_sub": 0.5}),
            json.dumps({"kind": "eval", "step": 3, "pressure_rel_l2_sub": 0.4}),
            json.dumps({"kind": "eval", "step": 3, "pressure_rel_l2": 0.3}),
        ]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


class Page(HTMLParser):
    """Collects tags and everything that would make a browser fetch something."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.fetched, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in ("meta", "img", "use", "path", "br"):
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset", "data", "poster"):
                self.fetched.append(value)

    def handle_endtag(self, tag):
        if self.open and tag == self.open[-1]:
            self.open.pop()


def predict_a_case(folder, name="run_1"):
    """Write a predicted Ahmed-like box of quads as OUT/<name>.vtp."""
    mesh = pv.Box(bounds=(-2, 2, -0.6, 0.6, 0, 1), level=6)
    mesh.clear_data()
    mesh.save(folder.parent / "source.vtp")
    centre = mesh.cell_centers().points
    truth = {
        "pressure": centre[:, 0].astype(np.float32),
        "wall_shear": centre.astype(np.float32),
    }
    predictions = {field: values * np.float32(1.1) for field, values in truth.items()}
    return write_vtp(
        folder.parent / "source.vtp", folder / f"{name}.vtp", predictions, truth, FIELD_MAP, "cell"
    )


@pytest.mark.slow
def test_the_page_needs_nothing_else_and_shows_everything(tmp_path):
    run = write_run(tmp_path / "first run")
    predictions = run / "predictions"
    predictions.mkdir()
    (predictions / "metrics.json").write_text(json.dumps(METRICS))
    header = json.dumps({"a": {"shape": [10, 20]}, "__metadata__": {}, "b": {"shape": [5]}})
    weights = struct.pack("<Q", len(header)) + header.encode()
    (run / "model.safetensors").write_bytes(weights)
    path = write_report(run)
    assert path == run / "report.html"
    text = path.read_text()
    page = Page(text)
    assert all(value.startswith(("data:image/png;base64,", "#")) for value in page.fetched)
    assert not re.search(r"https?://|@import|url\((?!#)", text)
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert "first run" in text
    for word in (
        "FLARE++",
        "0.1525",
        "0.0151",
        "m²/s²",
        "GiB",
        "Training loss",
        "Validation error",
    ):
        assert word in text
    assert ">205<" in text  # parameters, from the weights' header
    assert text.index("0.1525") < text.index("What was run") < text.index("Training loss")
    assert "prefers-color-scheme: dark" in text
    assert page.open == []  # every tag is closed
    assert sorted(p.name for p in run.iterdir() if p.name.startswith(".")) == []


@pytest.mark.slow
def test_whatever_is_interpolated_is_escaped(tmp_path):
    evil = "<script>alert('x')</script>"
    run = write_run(tmp_path / "a<b>&c", data={"store": evil}, model={"mixer": evil})
    (run / "predictions").mkdir()
    metrics = json.loads(json.dumps(METRICS))
    metrics["cases"] = {evil: metrics["cases"]["run_1"]}
    metrics["cases"][evil]["forces"] = {evil: {"pred": 0.1, "true": 0.2}}
    metrics["units"] = {"pressure": evil}
    metrics["notices"] = [evil]
    (run / "predictions" / "metrics.json").write_text(json.dumps(metrics))
    text = write_report(run).read_text()
    assert "<script" not in text
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;" in text
    assert "a&lt;b&gt;&amp;c" in text


def test_a_truncated_last_line_is_tolerated_with_a_notice(tmp_path):
    run = write_run(tmp_path / "run", [step(1), step(2), '{"step": 3, "lo'])
    history = read_history(run / "metrics.jsonl")
    assert [row["step"] for row in history.steps] == [1, 2]
    assert "the last line of metrics.jsonl (line 3) is incomplete" in write_report(run).read_text()


def test_a_damaged_line_elsewhere_is_an_error(tmp_path):
    run = write_run(tmp_path / "run", [step(1), "nonsense", step(3)])
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2 is no record of a step"):
        write_report(run)
    assert not (run / "report.html").exists()


def test_a_resumed_run_counts_each_step_once(tmp_path):
    lines = [step(1), step(2, loss=9.0), step(2, loss=5.0), step(3)]
    history = read_history(write_run(tmp_path / "run", lines) / "metrics.jsonl")
    steps, losses = history.column("loss")
    assert steps.tolist() == [1, 2, 3]
    assert losses[1] == 5.0
    assert "1 lines repeat" in history.notices[0]


def test_a_subsample_and_the_whole_surface_of_one_step_are_both_kept(tmp_path):
    history = read_history(write_run(tmp_path / "run") / "metrics.jsonl")
    assert history.evaluation_keys() == ["pressure_rel_l2_sub", "pressure_rel_l2"]
    assert history.evaluations[-1]["pressure_rel_l2_sub"] == 0.4
    assert history.evaluations[-1]["pressure_rel_l2"] == 0.3
    assert history.notices == []


def test_a_run_that_has_just_begun_has_a_report(tmp_path):
    run = write_run(tmp_path / "run", [])
    (run / "metrics.jsonl").unlink()
    text = write_report(run).read_text()
    assert "metrics.jsonl is absent" in text
    assert "What was run" in text


def test_what_is_missing_or_damaged_is_named(tmp_path):
    with pytest.raises(DataError, match=r"no config\.yaml"):
        write_report(tmp_path)
    run = write_run(tmp_path / "run")
    with pytest.raises(DataError, match=r"predictions folder .*nowhere does not exist"):
        write_report(run, tmp_path / "nowhere")
    (run / "predictions").mkdir()
    (run / "predictions" / "metrics.json").write_text('{"cases": 3}')
    with pytest.raises(DataError, match=r"metrics\.json is damaged"):
        write_report(run)
    (run / "config.yaml").write_text("a: [")
    with pytest.raises(DataError, match=r"config\.yaml is damaged"):
        write_report(run)


@pytest.mark.slow
def test_predictions_newer_than_their_evaluation_are_named(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "predictions").mkdir()
    (run / "predictions" / "metrics.json").write_text(json.dumps(METRICS))
    for name in ("run_1", "run_2"):
        (run / "predictions" / f"{name}.npz").touch()
    os.utime(run / "predictions" / "run_1.npz", (0, 0))
    os.utime(run / "predictions" / "metrics.json", (1000, 1000))
    assert "predicted after the evaluation, so evaluate again: run_2<" in (
        write_report(run).read_text()
    )


def test_long_curves_are_thinned_without_losing_their_extremes():
    x, y = np.arange(10_000.0), np.random.default_rng(0).normal(size=10_000)
    steps, mean, low, high = thin_out(x, y, 600)
    assert len(steps) == len(mean) == 600
    assert (low.min(), high.max()) == (y.min(), y.max())
    assert np.all(np.diff(steps) > 0)
    assert thin_out(x[:5], y[:5])[1] is not None


def test_plots_follow_the_theme_and_hold_no_colour_of_their_own(tmp_path):
    history = read_history(write_run(tmp_path / "run") / "metrics.jsonl")
    for svg in (
        draw_curve(history, [("loss", "loss")], "Loss", "loss"),
        draw_evaluations(history),
        draw_parity(METRICS["cases"], "Cd"),
    ):
        assert svg.startswith('<svg role="img" aria-label="')
        assert "var(--ink)" in svg
        assert not re.search(r"#[0-9a-f]{6}\b(?<!#000000)", svg)
        assert "xmlns" not in svg
    assert draw_curve(history, [("no_such", "x")], "x", "x") is None
    assert draw_parity(METRICS["cases"], "Cl") is None


@pytest.mark.slow
def test_a_single_step_of_zero_can_be_drawn(tmp_path):
    lines = [step(1, loss=0.0, comm_s=0.0, peak_mem_bytes=0)]
    assert "Training loss" in write_report(write_run(tmp_path / "run", lines)).read_text()


@pytest.mark.slow
def test_pictures_are_drawn_and_captioned(tmp_path):
    run = write_run(tmp_path / "run")
    predictions = run / "predictions"
    for name in ("run_1", "run_2"):
        predict_a_case(predictions, name)
    (predictions / "metrics.json").write_text(json.dumps(METRICS))
    text = write_report(run).read_text()
    if "rendering is impossible" in text:
        pytest.skip(text[text.index("rendering is impossible") :].splitlines()[0][:200])
    assert text.count('src="data:image/png;base64,') == 4  # two cases, two fields
    assert "the best case; relative L2 0.1000" in text
    assert "the worst case; relative L2 0.2000" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import sys; sys.exit('no OpenGL here')", "no OpenGL here"),
        ("import os; os.kill(os.getpid(), 9)", "the renderer ended with -9"),
    ],
)
def test_where_rendering_is_impossible_the_page_says_so(tmp_path, monkeypatch, program, reason):
    run = write_run(tmp_path / "run")
    predict_a_case(run / "predictions")
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{program}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    text = write_report(run).read_text()
    assert f"no pictures of run_1: rendering is impossible here ({reason})" in text
    assert "Predicted surfaces" not in text


def test_a_comparison_names_what_the_file_lacks(tmp_path):
    vtp = predict_a_case(tmp_path / "out")
    assert fields_to_draw(vtp) == {"pressure": ("pMeanTrim",), "wall_shear": ("tau",)}
    with pytest.raises(DataError, match=r"run_1\.vtp has no array 'speed_pred'; it holds"):
        render_comparison(vtp, "speed", tmp_path / "a.png")
    with pytest.raises(DataError, match="does not exist"):
        render_comparison(tmp_path / "none.vtp", "p", tmp_path / "a.png")


def test_truth_that_the_mesh_does_not_hold_is_prediction_minus_error(tmp_path):
    mesh = pv.read(predict_a_case(tmp_path / "out"))
    assert "pMeanTrim" not in mesh.cell_data
    truth, prediction, error, is_vector, on_cells = _columns(tmp_path, mesh, ("pMeanTrim",))
    assert truth == pytest.approx(mesh.cell_centers().points[:, 0], abs=1e-6)
    assert np.array_equal(prediction - error, truth)
    assert (is_vector, on_cells) == (False, True)
    mesh.point_data["tau"] = np.zeros((mesh.n_points, 3))  # of another association: not the truth
    truth, _, _, is_vector, _ = _columns(tmp_path, mesh, ("tau",))
    assert is_vector
    assert truth == pytest.approx(np.linalg.norm(mesh.cell_centers().points, axis=1), abs=1e-6)


@pytest.mark.parametrize("kind", ["cell_data", "point_data"])
def test_a_large_surface_is_simplified_for_the_picture_alone(monkeypatch, kind):
    monkeypatch.setattr(plots, "_MAX_DRAWN_CELLS", 1000)
    monkeypatch.setattr(plots, "_BINS", 20)
    mesh = pv.Sphere(theta_resolution=80, phi_resolution=80)
    places = mesh.cell_centers().points if kind == "cell_data" else mesh.points
    mesh.clear_data()
    getattr(mesh, kind)["Truth"] = places[:, 0].astype(np.float32)
    small = plots._simplify(mesh)
    assert small.n_cells < mesh.n_cells / 2
    found = small.cell_centers().points if kind == "cell_data" else small.points
    # A value may come from anywhere within a bin of 1/20 of the diameter, or beside it.
    assert np.abs(getattr(small, kind)["Truth"] - found[:, 0]).max() < 0.1
    monkeypatch.setattr(plots, "_MAX_DRAWN_CELLS", 10**6)
    assert plots._simplify(mesh) is mesh


def test_the_view_turns_with_the_sources_axes():
    # canonical z (up) is the source's y in a map of [x, -z, y]
    assert _to_source((0, 0, 1), ["x", "-z", "y"]) == (0, 1, 0)
    assert _to_source((0, 1, 0), ["x", "-z", "y"]) == (0, 0, -1)
    assert _to_source((1, 2, 3), None) == (1, 2, 3)
