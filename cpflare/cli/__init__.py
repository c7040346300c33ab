"""The `cpflare` command: single-process tools, and the launchers on one machine's ranks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from cpflare.errors import ConfigError, CpflareError
from cpflare.files import explain

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Exact context-parallel surrogates on meshes of millions of cells.",
)

_PASS_ON: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
    "add_help_option": False,
}


def _example(text: str) -> str:
    return f"Example:  [bold]{text}[/bold]"


@app.command(epilog=_example("cpflare synth data/cars --cases 8 --cells 20000"))
def synth(
    out: Annotated[Path, typer.Argument(help="folder for the files")],
    kind: Annotated[
        str, typer.Option(help="cars, darcy, elasticity, acoustics or navier_stokes")
    ] = "cars",
    cases: Annotated[int, typer.Option(min=1, help="number of cases")] = 8,
    cells: Annotated[int, typer.Option(min=100, help="cells of each case, about")] = 20_000,
    seed: Annotated[int, typer.Option(min=0, help="draws the cases")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="processes")] = 1,
) -> None:
    """Make a data set, laid out as a public one: cars, porous flow, elastic sheets, waves, flow."""
    from data_prep.generators import GENERATORS

    if kind not in GENERATORS:
        raise ConfigError(f"--kind {kind} must be one of {', '.join(GENERATORS)}")
    GENERATORS[kind](out, cases=cases, cells=cells, seed=seed, workers=workers)
    print(f"{cases} cases in {out}")


@app.command(epilog=_example("cpflare prep data/cars data/cars.zarr --dataset drivaerml"))
def prep(
    paths: Annotated[
        list[Path], typer.Argument(help="SRC… STORE: folders or files, then the store")
    ],
    dataset: Annotated[str | None, typer.Option(help="a shipped field map")] = None,
    field_map: Annotated[Path | None, typer.Option("--map", help="a field map of your own")] = None,
    splits: Annotated[Path | None, typer.Option(help="JSON of train, val, test")] = None,
    split_seed: Annotated[int, typer.Option(min=0, help="draws splits without a file")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="processes, one a file")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="draws the order of rows")] = 0,
    overwrite: Annotated[bool, typer.Option(help="replace a store that is there")] = False,
) -> None:
    """Convert VTP files and their like to a Zarr store whose rows the ranks can stream."""
    from data_prep.vtp_to_zarr import prepare

    if len(paths) < 2:
        raise ConfigError(f"prep got only {paths[0]}; give SRC… and then STORE")
    summary = prepare(
        paths[:-1],
        paths[-1],
        dataset=dataset,
        field_map=field_map,
        splits=splits,
        split_seed=split_seed,
        workers=workers,
        seed=seed,
        overwrite=overwrite,
    )
    print("\n".join(summary.lines()))
    for line in summary.errors():
        print(line, file=sys.stderr)
    if summary.failed:
        raise typer.Exit(2)
    if step := summary.next_step():
        print(step, file=sys.stderr)


@app.command(epilog=_example("cpflare inspect data/cars.zarr --verify"))
def inspect(
    store: Annotated[Path, typer.Argument(help="a prepared store, or one surface file")],
    verify: Annotated[bool, typer.Option(help="read everything and check it")] = False,
) -> None:
    """Show a store's cases, cells, fields and statistics; or a file's arrays, and draft its map."""
    from cpflare.data.verify import inspect_store
    from data_prep.draft import look_at

    if (text := look_at(store)) is not None:
        print(text)
        return
    report = inspect_store(store, verify=verify)
    print(report)
    if not report.ok:
        raise typer.Exit(2)


@app.command(epilog=_example("cpflare evaluate predictions --store data/cars.zarr"))
def evaluate(
    out: Annotated[Path, typer.Argument(help="folder of predictions")],
    store: Annotated[Path, typer.Option(help="the store that holds the truth")],
    as_json: Annotated[bool, typer.Option("--json", help="print metrics.json")] = False,
) -> None:
    """Metrics and forces of written predictions, into OUT/metrics.json."""
    from cpflare.data.store import Store
    from cpflare.evaluate.evaluate import evaluate_predictions, format_metrics

    metrics = evaluate_predictions(out, Store.open(store))
    print(json.dumps(metrics, indent=1) if as_json else format_metrics(metrics))


@app.command(epilog=_example("cpflare export predictions --format npz-chunks"))
def export(
    out: Annotated[Path, typer.Argument(help="folder of predictions")],
    format: Annotated[str, typer.Option(help="vtp, npz-chunks or zarr")],
    source: Annotated[Path | None, typer.Option(help="folder of the source meshes")] = None,
    field_map: Annotated[
        str | None, typer.Option("--map", help="field map of files that do not name theirs")
    ] = None,
) -> None:
    """Write predictions in another format, below OUT."""
    from cpflare.evaluate.export import export_predictions

    known = None
    if field_map is not None:
        from data_prep.fields import load_field_map

        known = load_field_map(field_map)
    written = export_predictions(
        out,
        format,
        source=source,
        field_map=known.to_dict() if known else None,
        association=known.stored_association if known else None,
    )
    print(written)


@app.command(epilog=_example("cpflare convert data/cars.zarr data/curator --layout curator-v3"))
def convert(
    store: Annotated[Path, typer.Argument(help="a prepared store")],
    out: Annotated[Path, typer.Argument(help="folder for one case each")],
    layout: Annotated[str, typer.Option(help="curator-v2, curator-v3 or flare")],
    case: Annotated[list[str] | None, typer.Option(help="only this case; may be repeated")] = None,
) -> None:
    """Write a store's cases as other projects read them: curator Zarr, or FLARE.py's .npy files."""
    from tqdm import tqdm

    from cpflare.data.store import Store
    from cpflare.log import show_progress
    from data_prep.layouts import require_outside, write

    opened = Store.open(store)
    require_outside(out, store)
    names = case or opened.cases
    for name in tqdm(names, unit="case", disable=not show_progress(0)):
        write(opened.case(name), out, layout)
    print(f"{len(names)} cases in {out}")


@app.command(epilog=_example("cpflare report runs/quickstart --predictions predictions"))
def report(
    run_dir: Annotated[Path, typer.Argument(help="a training run")],
    predictions: Annotated[Path | None, typer.Option(help="evaluated predictions to show")] = None,
) -> None:
    """One self-contained page on a run: RUN_DIR/report.html."""
    from cpflare.report.html import write_report

    print(write_report(run_dir, predictions))


@app.command(**_PASS_ON)
def train(context: typer.Context) -> None:
    """Train on this machine: cpflare train --nproc 2 CONFIG.yaml key=value …"""
    from cpflare.config import load_config
    from cpflare.data.store import Store
    from cpflare.parallel.topology import resolve_axes
    from data_prep.cars.embedded import EMBEDDED, is_embedded
    from launch import train_cp

    num_ranks, arguments = _ranks_of(context.args, train_cp.parser())
    options = train_cp.parser().parse_args(arguments)
    name, overrides = train_cp.split_arguments(options.config)
    config = load_config(name or EMBEDDED, overrides)
    resolve_axes(config.parallel, num_ranks)
    if name is not None or not is_embedded(config.data.store):
        Store.open(config.data.store)
    _launch("launch.train_cp", arguments, num_ranks)


@app.command(**_PASS_ON)
def predict(context: typer.Context) -> None:
    """Predict on this machine: cpflare predict --nproc 2 RUN_DIR --split test --out OUT"""
    from cpflare.train.run_dir import read_run
    from launch import predict_cp

    num_ranks, arguments = _ranks_of(context.args, predict_cp.parser())
    options = predict_cp.parser().parse_args(arguments)
    read_run(options.run_dir)
    _launch("launch.predict_cp", arguments, num_ranks)


@app.command("scaling", **_PASS_ON)
def measure_scaling(context: typer.Context) -> None:
    """Measure strong scaling: cpflare scaling --models flare,flarepp --ranks 1,2 --out OUT"""
    from cpflare.cli import scaling

    _pass_to(scaling, context.args)


@app.command("plan", **_PASS_ON)
def plan_training(context: typer.Context) -> None:
    """Predict memory and step time: cpflare plan --cells 8.6e6 --ranks 4 --device h100"""
    from cpflare.cli import plan

    _pass_to(plan, context.args)


@app.command("mixers", **_PASS_ON)
def list_mixers(context: typer.Context) -> None:
    """List the mixers and what each costs: cpflare mixers --config drivaerml_flarepp --ranks 4"""
    from cpflare.cli import mixers

    _pass_to(mixers, context.args)


def _pass_to(module: Any, arguments: Sequence[str]) -> None:
    """Run a tool that has a command line of its own, and answer --help with it."""
    if "--help" in arguments or "-h" in arguments:
        module.parser().print_help()
        raise typer.Exit(0)
    module.main(list(arguments))


def _ranks_of(arguments: Sequence[str], parser: Any) -> tuple[int, list[str]]:
    """Take --nproc R out of a launcher's arguments, and answer --help with the launcher's own."""
    from cpflare.arguments import Parser

    if "--help" in arguments or "-h" in arguments:
        parser.print_help()
        print("\nwith cpflare: --nproc R  number of ranks on this machine (default 1)")
        raise typer.Exit(0)
    own = Parser(add_help=False, allow_abbrev=False)
    own.add_argument("--nproc", type=int, default=1)
    found, rest = own.parse_known_args(list(arguments))
    if found.nproc < 1:
        raise ConfigError(f"--nproc {found.nproc} must be at least 1")
    return found.nproc, ["--debug", *rest] if found.debug else rest


def _launch(module: str, arguments: Sequence[str], num_ranks: int) -> None:
    from launch.ranks import run_on_ranks

    status = run_on_ranks(module, arguments, num_ranks)
    if status:
        raise typer.Exit(status)


def _line_of(error: Exception) -> str:
    if isinstance(error, OSError | UnicodeError) and not isinstance(error, CpflareError):
        return explain(error)
    if isinstance(error, MemoryError):
        return "out of memory; use fewer --workers, or a machine with more"
    return str(error)


def main() -> None:
    """Entry point: a user's error is one line on standard error and exit status 2."""
    debug = "--debug" in sys.argv[1:]
    command = typer.main.get_command(app)
    arguments = [a for a in sys.argv[1:] if a != "--debug"] if debug else sys.argv[1:]
    if debug and arguments[:1] in (["train"], ["predict"]):
        arguments = sys.argv[1:]
    try:
        status = command.main(args=arguments, standalone_mode=False)
        sys.stdout.flush()  # here, where a reader that has left is no failure
        sys.exit(status)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)  # as click has it
    except (CpflareError, OSError, UnicodeError, MemoryError) as error:
        if debug:
            raise
        print(f"error: {_line_of(error)}", file=sys.stderr)
        sys.exit(2)
    except typer.Abort:
        sys.exit(130)
    except Exception as error:
        # What click raises for a wrong command line; typer may bring a click of its own.
        describe = getattr(error, "format_message", None)
        if describe is None:
            raise
        print(f"error: {describe()}; see cpflare --help", file=sys.stderr)
        sys.exit(2)
