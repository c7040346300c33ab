"""Pictures: a predicted surface beside the truth and the error, and coefficient parity plots."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cpflare.errors import DataError
from cpflare.fields import Axes
from cpflare.files import one_line
from cpflare.report.curves import GRID, INK, MUTED, SERIES, new_axes, to_svg

Array = NDArray[Any]

# Where the eye stands, in canonical axes (x downstream, y lateral, z up), seen from the body.
_VIEWS = {"front": (-1.0, -0.9, 0.55), "rear": (1.0, -0.9, 0.55)}
_MAX_DRAWN_CELLS, _BINS = 1_000_000, 700
_DESCRIPTION = "cpflare_description"  # field data of a written prediction


def render_comparison(vtp: Path, array: str | Sequence[str], png: Path) -> None:
    """Draw truth, prediction and error of a written prediction, from the front and the rear.

    `array` is the source's name of a field, or three names of a vector in components.  Truth and
    prediction share one colour scale (the truth's 0.5 to 99.5 percentiles), the error of a scalar
    has a symmetric one; vectors are shown as magnitudes, and their error as the magnitude of the
    difference.

    Raises:
        DataError: the file cannot be read, or lacks the prediction or the error of `array`.
    """
    import pyvista as pv
    from matplotlib.figure import Figure

    vtp, png = Path(vtp), Path(png)
    names = (array,) if isinstance(array, str) else tuple(array)
    mesh = _read(vtp)
    description = _describe(mesh)
    truth, prediction, error, is_vector, on_cells = _columns(vtp, mesh, names)
    panels = _panels(truth, prediction, error, is_vector)
    axes_map = (description.get("field_map") or {}).get("axes")
    surface = pv.PolyData()
    surface.CopyStructure(mesh)
    for panel in panels:
        data = surface.cell_data if on_cells else surface.point_data
        data[panel.title] = panel.values.astype(np.float32)
    surface = _simplify(surface)

    figure = Figure(figsize=(13.5, 5.6), facecolor="white")
    margins = {"left": 0.015, "right": 0.985, "top": 0.93, "bottom": 0.13}
    ratios = (1, 1, 0.045)
    grid = figure.add_gridspec(3, 3, height_ratios=ratios, hspace=0.02, wspace=0.02, **margins)
    for column, panel in enumerate(panels):
        for row, image in enumerate(_render(surface, panel, axes_map)):
            axes = figure.add_subplot(grid[row, column])
            axes.imshow(image)
            axes.set_axis_off()
            if row == 0:
                axes.set_title(panel.title, fontsize=13)
    name, unit, bar = ", ".join(names), _unit(names, description), "|" if is_vector else ""
    _add_colour_bar(figure, grid[2, :2], panels[0], f"{bar}{name}{bar}{unit}")
    _add_colour_bar(figure, grid[2, 2], panels[2], f"{bar}error of {name}{bar}{unit}")
    png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png, dpi=110, format="png")


class _Panel(NamedTuple):
    title: str
    values: Array
    scale: Any  # matplotlib's Normalize
    colours: str


def _panels(truth: Array, prediction: Array, error: Array, is_vector: bool) -> list[_Panel]:
    from matplotlib.colors import Normalize

    low, high = np.percentile(truth, [0.5, 99.5])
    bound = float(np.percentile(np.abs(error), 99.5)) or 1.0
    shared = Normalize(float(low), float(high) if high > low else float(low) + 1.0)
    own = Normalize(0.0 if is_vector else -bound, bound)
    kind = "magnitude of the difference" if is_vector else "prediction − truth"
    return [
        _Panel("Truth", truth, shared, "viridis"),
        _Panel("Prediction", prediction, shared, "viridis"),
        _Panel(f"Error ({kind})", error, own, "magma_r" if is_vector else "RdBu_r"),
    ]


def _add_colour_bar(figure: Any, place: Any, panel: _Panel, label: str) -> None:
    import matplotlib
    from matplotlib.cm import ScalarMappable
    from matplotlib.ticker import MaxNLocator

    inner = place.subgridspec(1, 3, width_ratios=(0.12, 1, 0.12))[0, 1]
    bar = figure.colorbar(
        ScalarMappable(panel.scale, matplotlib.colormaps[panel.colours]),
        cax=figure.add_subplot(inner),
        orientation="horizontal",
        extend="both" if panel.scale.vmin != 0.0 else "max",
    )
    bar.set_label(label, fontsize=11)
    bar.locator = MaxNLocator(4)
    bar.outline.set_visible(False)


def fields_to_draw(vtp: Path) -> dict[str, tuple[str, ...]]:
    """Return canonical field -> source names of what a VTP holds as prediction with error."""
    mesh = _read(Path(vtp), only_names=True)
    described = _describe(mesh).get("source_names") or {}
    present = _array_names(mesh)
    if not described:
        predicted = sorted(name for name in present if name.endswith("_pred"))
        described = {name: [name.removesuffix("_pred")] for name in predicted}
    return {
        name: tuple(sources)
        for name, sources in described.items()
        if all({f"{source}_pred", f"{source}_error"} <= present for source in sources)
    }


def _array_names(mesh: Any) -> set[str]:
    return {*mesh.cell_data.keys(), *mesh.point_data.keys()}


def _read(path: Path, *, only_names: bool = False) -> Any:
    import pyvista as pv

    if not path.is_file():
        raise DataError(f"prediction {path} does not exist; run launch/predict_cp.py first")
    try:
        mesh = pv.read(path)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"prediction {path} cannot be read: {one_line(error)}") from error
    if not isinstance(mesh, pv.PolyData) or (mesh.n_cells == 0 and not only_names):
        raise DataError(f"prediction {path} holds no surface; predict this case again")
    return mesh


def _describe(mesh: Any) -> dict[str, Any]:
    if _DESCRIPTION not in mesh.field_data:
        return {}
    found: dict[str, Any] = json.loads(str(mesh.field_data[_DESCRIPTION][0]))
    return found


def _columns(path: Path, mesh: Any, names: Sequence[str]) -> tuple[Array, Array, Array, bool, bool]:
    """Return truth, prediction and error as scalars [N], whether they are magnitudes and on cells.

    Where the source holds the truth elsewhere (points averaged to cells, a file of its own), it is
    prediction − error.
    """
    on_cells = f"{names[0]}_pred" in mesh.cell_data
    data = mesh.cell_data if on_cells else mesh.point_data
    prediction, error = (
        np.concatenate([_array(path, mesh, data, name + suffix) for name in names], axis=1)
        for suffix in ("_pred", "_error")
    )
    if all(name in data for name in names):
        truth = np.concatenate([_array(path, mesh, data, name) for name in names], axis=1)
    else:
        truth = prediction - error
    if truth.shape[1] == 1:
        return truth[:, 0], prediction[:, 0], error[:, 0], False, on_cells
    lengths = (np.linalg.norm(column, axis=1) for column in (truth, prediction, error))
    return *lengths, True, on_cells


def _array(path: Path, mesh: Any, data: Any, name: str) -> Array:
    if name not in data:
        raise DataError(
            f"prediction {path} has no array '{name}'; it holds "
            f"{', '.join(sorted(_array_names(mesh))) or 'none'}"
        )
    return np.asarray(data[name], dtype=np.float64).reshape(len(data[name]), -1)


def _unit(names: Sequence[str], description: Mapping[str, Any]) -> str:
    """The array's unit in brackets, where the source's unit is that of the store."""
    field_map = description.get("field_map") or {}
    for field, sources in (description.get("source_names") or {}).items():
        entry = (field_map.get("fields") or {}).get(field) or {}
        unit = (field_map.get("units") or {}).get(field)
        if tuple(sources) == tuple(names) and unit and float(entry.get("scale", 1.0)) == 1.0:
            return f"  [{unit.replace('m2/s2', 'm²/s²')}]"
    return ""


def _simplify(surface: Any) -> Any:
    """Merge the cells of a large surface that fall into one pixel, keeping one's values.

    Without a graphics card all cells take long to draw, and a panel has fewer pixels than that.
    """
    import pyvista as pv
    from vtkmodules.vtkFiltersCore import vtkBinnedDecimation, vtkTriangleFilter

    if surface.n_cells <= _MAX_DRAWN_CELLS:
        return surface
    triangles = vtkTriangleFilter()
    triangles.SetInputData(surface)
    triangles.PassVertsOff()
    triangles.PassLinesOff()
    extent = np.ptp(np.reshape(surface.bounds, (3, 2)), axis=1)
    divisions = np.maximum(1, extent / max(extent.max(), 1e-300) * _BINS).astype(int)
    merged = vtkBinnedDecimation()
    merged.SetInputConnection(triangles.GetOutputPort())
    merged.AutoAdjustNumberOfDivisionsOff()
    merged.SetNumberOfDivisions(*divisions.tolist())
    merged.ProduceCellDataOn()
    merged.ProducePointDataOn()
    merged.Update()
    return pv.wrap(merged.GetOutput())


def _render(surface: Any, panel: _Panel, axes_map: Sequence[str] | None) -> list[Array]:
    """Render both views of a surface coloured by one of its arrays, cropped to the body."""
    import pyvista as pv

    plotter: Any = pv.Plotter(off_screen=True, window_size=[1000, 620])
    plotter.set_background("white")
    try:
        plotter.add_mesh(
            surface,
            scalars=panel.title,
            cmap=panel.colours,
            clim=(panel.scale.vmin, panel.scale.vmax),
            show_scalar_bar=False,
            ambient=0.35,
            diffuse=0.7,
            specular=0.05,
        )
        images = []
        for view in _VIEWS.values():
            plotter.view_vector(_to_source(view, axes_map), viewup=_to_source((0, 0, 1), axes_map))
            plotter.camera.zoom(1.25)
            images.append(_crop(np.asarray(plotter.screenshot(return_img=True))))
    finally:
        plotter.close()
    return images


def _to_source(vector: Sequence[float], axes_map: Sequence[str] | None) -> tuple[float, ...]:
    """Turn a canonical direction into the source's axes; canonical i is axis `axes_map[i]`."""
    return tuple(Axes.parse(axes_map).to_source(np.array(vector, dtype=np.float64)).tolist())


def _crop(image: Array, margin: int = 12) -> Array:
    """Cut away white borders, so that the body fills its panel."""
    rows, columns = np.nonzero((image < 250).any(axis=2))
    if not len(rows):
        return image
    return image[
        max(0, rows.min() - margin) : rows.max() + margin,
        max(0, columns.min() - margin) : columns.max() + margin,
    ]


def draw_parity(cases: Mapping[str, Mapping[str, Any]], name: str) -> str | None:
    """Draw predicted over true coefficient of every case as SVG; None where no case has it."""
    pairs = {
        case: result["forces"][name]
        for case, result in cases.items()
        if name in (result.get("forces") or {})
    }
    if not pairs:
        return None
    true, pred = (np.array([pair[side] for pair in pairs.values()]) for side in ("true", "pred"))
    figure, axes = new_axes(f"{name}, predicted against true", "predicted", size=(4.2, 3.8))
    low, high = float(min(true.min(), pred.min())), float(max(true.max(), pred.max()))
    pad = 0.12 * (high - low) or 0.1 * abs(high) or 0.1
    limits = (low - pad, high + pad)
    axes.plot(limits, limits, color=MUTED, linewidth=1.0, dashes=(4, 3))
    axes.scatter(true, pred, s=28, color=SERIES[0], zorder=3, linewidths=0)
    if len(pairs) <= 8 and max(map(len, pairs)) <= 10:
        for case, x, y in zip(pairs, true, pred, strict=True):
            axes.annotate(
                case, (x, y), xytext=(6, -3), textcoords="offset points", fontsize=8, color=INK
            ).set_in_layout(False)
    axes.set(xlim=limits, ylim=limits, box_aspect=1)
    axes.set_xlabel("true", fontsize=9, color=MUTED)
    axes.spines["left"].set_visible(True)
    axes.spines["left"].set_color(GRID)
    axes.locator_params(nbins=5)
    return to_svg(figure, f"Parity of {name}")


def main(arguments: Sequence[str]) -> int:
    """Render every field of a VTP into a folder and print `{field: [names, file]}` as JSON.

    A process of its own (`python -m cpflare.report.plots VTP FOLDER`), because a machine without
    a usable OpenGL ends the process instead of raising.
    """
    vtp, folder = (Path(argument) for argument in arguments)
    drawn = {}
    for index, (field, names) in enumerate(fields_to_draw(vtp).items()):
        png = folder / f"{vtp.stem}_{index}.png"
        render_comparison(vtp, names, png)
        drawn[field] = [list(names), png.name]
    print(json.dumps(drawn))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
