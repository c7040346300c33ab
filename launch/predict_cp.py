"""Predicts whole surfaces on all ranks:  torchrun --nproc_per_node=4 launch/predict_cp.py RUN …"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from cpflare.arguments import Parser
from cpflare.config import ParallelConfig, parse_bytes
from cpflare.data.store import Store
from cpflare.engine import parallelize
from cpflare.errors import ConfigError, DataError
from cpflare.evaluate.evaluate import seen_in_training
from cpflare.evaluate.job import Mesh, Predictor
from cpflare.evaluate.predict import Inference, load_weights
from cpflare.evaluate.sanity import Trained
from cpflare.log import set_up_logging
from cpflare.models import build_model
from cpflare.parallel.device import has_precision
from cpflare.parallel.runtime import agreed, run_guarded, same_on_all
from cpflare.parallel.topology import build_topology, environment_ranks, start_ranks
from cpflare.train.run_dir import WEIGHTS, RunDescription, read_run

EXAMPLES = """\
examples:
  torchrun --nproc_per_node=2 launch/predict_cp.py runs/quickstart --split test --out predictions
  torchrun --nproc_per_node=4 launch/predict_cp.py runs/full --cases run_7,run_8 --out out \\
      --source /data/raw
  torchrun --nproc_per_node=2 launch/predict_cp.py runs/full --mesh new_car.stl --out out \\
      --ref-area 2.2
"""

logger = logging.getLogger("cpflare")


def parser() -> Parser:
    """The command line of `predict_cp.py` and of `cpflare predict`."""
    parser = Parser(
        prog="predict_cp.py",
        description="Predict every cell of whole cases in one exact pass, split over the ranks.",
        epilog=EXAMPLES,
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="a finished training run")
    parser.add_argument("--cases", help="names of cases of the store, separated by commas")
    parser.add_argument(
        "--case", action="append", help="one case, whose name may have commas; may be repeated"
    )
    parser.add_argument("--split", help="all cases of a split of the store: train, val or test")
    parser.add_argument("--mesh", type=Path, nargs="+", help="meshes without a store")
    parser.add_argument("--out", type=Path, required=True, help="folder of the predictions")
    parser.add_argument("--store", type=Path, help="the store, where it is not the training's")
    parser.add_argument("--source", type=Path, help="folder of the source meshes, if they moved")
    parser.add_argument("--memory-limit", help="of each rank, such as 6GiB: chunks follow from it")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="as parallel.device"
    )
    parser.add_argument("--ref-area", type=float, help="reference area of --mesh in m²")
    parser.add_argument(
        "--length-scale", type=float, help="metres a unit of --mesh, such as 0.001 for millimetres"
    )
    parser.add_argument(
        "--mirror", choices=["x", "y", "z"], help="--mesh is a half, mirrored normal to this"
    )
    parser.add_argument("--speed", type=float, help="free-stream speed of --mesh in m/s")
    return parser


def main(argv: Sequence[str]) -> None:
    """One rank's share of the predictions."""
    with same_on_all():
        options = _options(argv)
    rank, world_size, _ = environment_ranks()
    set_up_logging(rank, world_size)
    parallel = ParallelConfig(device=options.device)
    _, device = start_ranks(parallel.timeout_s, parallel.device)
    topology = build_topology(parallel, device)
    with agreed(topology.world_comm):
        run = read_run(options.run_dir)
        model = build_model(run.config)
        load_weights(model, options.run_dir / WEIGHTS)
        parallelize(model.to(device), topology.cp_comm)
        engine = run.config.engine
        if options.memory_limit is not None:
            parse_bytes(options.memory_limit)
            engine = dataclasses.replace(engine, memory_limit=options.memory_limit)
        precision = run.config.train.precision
        if not has_precision(precision, device):
            if rank == 0:
                logger.warning("notice: this GPU has no %s; predicting in fp32", precision)
            precision = "fp32"
        inference = Inference(device, precision, engine)
        predictor = Predictor(
            model,
            run.normalizer,
            inference,
            run.field_map,
            topology,
            options.out,
            run.was_trained_on,
            Trained.of(run.dataset, run.normalizer),
        )
        store, cases = (None, ()) if options.mesh else _store_and_cases(options, run)
        if rank == 0:
            if store is not None:
                told = {name: run.was_trained_on(store.case(name)) for name in cases}
                for notice in seen_in_training(told, store):
                    logger.warning("notice: %s", notice)
            options.out.mkdir(parents=True, exist_ok=True)
    with topology.stop.on_signals():
        if store is not None:
            written = predictor.predict_cases(store, cases, options.source)
        else:
            written = predictor.predict_meshes(
                options.mesh,
                _mesh_reader(run, options.length_scale),
                {"area": options.ref_area, "speed": options.speed, "mirror": options.mirror},
            )
    for path in written:
        print(path)
    if rank == 0 and store is not None:
        out, known, run_dir = map(shlex.quote, map(str, (options.out, store.path, options.run_dir)))
        report = f"cpflare report {run_dir} --predictions {out}"
        logger.info("next: cpflare evaluate %s --store %s && %s", out, known, report)


def _options(argv: Sequence[str]) -> argparse.Namespace:
    options = parser().parse_args(argv)
    named = options.cases if options.case is None else options.case
    if sum(value is not None for value in (named, options.split, options.mesh)) != 1:
        raise ConfigError("give one of --cases (or --case), --split and --mesh; see --help")
    scale = options.length_scale
    if scale is not None and not (options.mesh and 0 < scale < math.inf):
        raise ConfigError(f"--length-scale {scale} must be positive, and goes with --mesh")
    return options


def _store_and_cases(
    options: argparse.Namespace, run: RunDescription
) -> tuple[Store, Sequence[str]]:
    store = Store.open(options.store or run.find_store())
    if store.field_map != run.field_map:
        raise DataError(
            f"store {store.path} was prepared with the field map {store.dataset}, the run with "
            f"{run.dataset['name']}; predict with a store of the run's map"
        )
    if options.split:
        cases = store.split(options.split)
    else:
        listed = options.cases.split(",") if options.cases is not None else []
        cases = tuple(dict.fromkeys([*listed, *(options.case or [])]))
    for name in cases:
        store.case(name)
    if not cases:
        raise DataError(f"split {options.split} of store {store.path} has no cases")
    return store, cases


def _mesh_reader(run: RunDescription, length_scale: float | None):  # type: ignore[no-untyped-def]
    from data_prep.fields import FieldMap
    from data_prep.parameters import read_parameters
    from data_prep.read import load_case

    scale = {} if length_scale is None else {"length_scale": length_scale}
    field_map = FieldMap.from_dict(run.field_map | scale)

    def read(path: Path) -> Mesh:
        mesh = load_case(path, field_map, with_targets=False)
        if not run.normalizer.parameters:
            return mesh
        parameters = read_parameters(path, field_map)
        return dataclasses.replace(mesh, attrs={**mesh.attrs, "parameters": parameters})

    return read


if __name__ == "__main__":
    sys.exit(run_guarded(lambda: main(sys.argv[1:]), debug="--debug" in sys.argv))
