"""The prediction job: whole cases of a store, or meshes, to files that rank 0 writes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from cpflare.data.loader import ShardReader
from cpflare.data.normalize import Normalizer
from cpflare.data.sampler import Window
from cpflare.data.store import Case, Store
from cpflare.errors import DataError
from cpflare.evaluate.exchange import check_finite
from cpflare.evaluate.export import write_npz, write_vtp
from cpflare.evaluate.find import find_source
from cpflare.evaluate.forces import Reference, coefficients, integrate
from cpflare.evaluate.predict import (
    Inference,
    gather_in_source_order,
    predict_shard,
    run_model,
)
from cpflare.evaluate.sanity import Trained, half_of
from cpflare.files import checksum_of, refuse_overwriting, size_of, written_aside
from cpflare.formats.files import SUFFIXES
from cpflare.formats.search import parts
from cpflare.log import show_progress
from cpflare.models import Backbone
from cpflare.parallel.partition import shard_bounds
from cpflare.parallel.runtime import Stopped, agreed
from cpflare.parallel.topology import Topology
from cpflare.precision import weight_dtype

logger = logging.getLogger("cpflare")

Array = NDArray[Any]
Fields = dict[str, Array]


class Mesh(Protocol):
    """What a mesh reader returns: canonical geometry in source order, and what is known of it."""

    fields: dict[str, NDArray[Any]]
    association: str
    offset: NDArray[np.float64]
    attrs: dict[str, Any]


@dataclass(frozen=True)
class Predictor:
    """A trained model on the ranks of a topology (cp = all of them), and where its files go."""

    model: Backbone
    normalizer: Normalizer
    inference: Inference
    field_map: Mapping[str, Any]
    topology: Topology
    out: Path
    was_trained_on: Callable[[Case], bool | None] = lambda case: None
    trained: Trained | None = None

    def predict_cases(
        self, store: Store, cases: Sequence[str], source: Path | None = None
    ) -> list[Path]:
        """Predict whole cases of a store, one after another; returns the files (on rank 0).

        Each rank reads its share of a case's rows once. A case becomes OUT/<case>.vtp on its source
        mesh (`source` says where meshes are now, where they have moved), or OUT/<case>.npz with a
        notice where the mesh is gone.

        Communication: the model's reductions, and gathers of the predicted fields to rank 0.

        Raises:
            Stopped: a signal asked for it; the files of the cases before are whole.
        """
        self._keep_sources(cases, lambda: _sources_of(store, cases, source, self.field_map))
        reader = ShardReader(
            store,
            self.normalizer,
            weight_dtype(self.inference.precision),
            self.topology.cp,
            self.topology.cp_rank,
        )
        written = []
        for name in self._progress(cases):
            case = store.case(name)
            if "bounds" in case.attrs:
                self._remark(name, np.array(case.attrs["bounds"], np.float64), case.num_rows)
            window = Window(name, 0, case.num_rows, case.num_rows)
            targets = [field for field in self.normalizer.targets if field in case.fields]
            predicted = predict_shard(self.model, reader, window, self.inference)
            stored = reader.read_fields(window, ["cell_id", *targets])
            rows = stored.pop("cell_id")
            sizes = window.shard_sizes(self.topology.cp)
            comm = self.topology.cp_comm
            whole = gather_in_source_order(predicted, rows, sizes, comm)
            truth = gather_in_source_order(stored, rows, sizes, comm)
            if whole is not None:
                check_finite(name, whole)
                written.append(self._write(case, whole, truth or None, source))
        return written

    def _keep_sources(self, names: Sequence[str], sources: Callable[[], list[Path]]) -> None:
        """Refuse, before anything is computed, files that would take a source's place."""
        with agreed(self.topology.world_comm):
            if self.topology.rank == 0:
                files = [self.out / f"{name}{end}" for name in names for end in (".vtp", ".npz")]
                read = [part for path in sources() if path.is_file() for part in parts(path)]
                refuse_overwriting([*files, self.out / "forces.json"], read)

    def _write(self, case: Case, fields: Fields, truth: Fields | None, source: Path | None) -> Path:
        mesh = _source_mesh(case, source, self.field_map.get("files") or ())
        if isinstance(mesh, Path):
            return write_vtp(
                mesh,
                self.out / f"{case.name}.vtp",
                fields,
                truth,
                self.field_map,
                case.association,
                source_names=case.attrs.get("source_names"),
                trained_on=self.was_trained_on(case),
            )
        logger.warning("notice: %s; writing %s.npz", mesh, case.name)
        return write_npz(
            self.out / f"{case.name}.npz",
            fields,
            truth,
            field_map=self.field_map,
            association=case.association,
            trained_on=self.was_trained_on(case),
        )

    def predict_meshes(
        self,
        meshes: Sequence[Path],
        read_mesh: Callable[[Path], Mesh],
        constants: Mapping[str, float | str | None] = MappingProxyType({}),
    ) -> list[Path]:
        """Predict meshes without a store: OUT/<stem>.vtp each, and OUT/forces.json with
        coefficients.

        Every rank reads the mesh; its geometry comes from the code that prepared the training data.
        `constants` (area in m², speed in m/s, mirror) replace the field map's, where not None.
        """
        given = {name: value for name, value in constants.items() if value is not None}
        reference = {**(self.field_map.get("reference") or {}), **given}
        stems = [path.stem for path in meshes]
        for stem in stems:
            if stems.count(stem) > 1:
                raise DataError(
                    f"two meshes are called {stem}; rename one, or predict it by itself"
                )
        self._keep_sources(stems, lambda: list(meshes))
        written, forces = [], {}
        for path in self._progress(meshes):
            mesh = read_mesh(path)
            fields = self._predict_mesh(mesh)
            if fields is None:
                continue
            for notice in mesh.attrs.get("notices", []):
                logger.warning("notice: %s: %s", path, notice)
            position = mesh.fields["position"]
            bounds = np.stack([position.min(axis=0), position.max(axis=0)], axis=1)
            whole = mesh.attrs.get("closed") or reference.get("mirror")
            cut = None if whole else mesh.fields["area_vector"].sum(axis=0)
            self._remark(path, bounds, len(position), cut)
            check_finite(path.stem, fields)
            out = self.out / f"{path.stem}.vtp"
            written.append(write_vtp(path, out, fields, None, self.field_map, mesh.association))
            forces[path.stem] = self._forces(path.stem, mesh, fields, reference)
        if self.topology.rank == 0:
            with written_aside(self.out / "forces.json") as aside:
                aside.write_text(json.dumps(forces, indent=2) + "\n")
        return written

    def _remark(self, what: object, bounds: Array, rows: int, open_by: Array | None = None) -> None:
        """Say what is odd about a surface with these bounds [3, 2]."""
        low, high = bounds.T
        remarks = self.trained.remarks(low, high, rows) if self.trained is not None else []
        half = half_of(open_by, low, high) if open_by is not None else None
        if self.topology.rank == 0:
            for remark in [*remarks, *([half] if half else [])]:
                logger.warning("notice: %s: %s", what, remark)

    def _predict_mesh(self, mesh: Mesh) -> Fields | None:
        num_rows = len(mesh.fields["position"])
        first, last = shard_bounds(num_rows, self.topology.cp, self.topology.cp_rank)
        shard = {name: values[first:last] for name, values in mesh.fields.items()}
        shard["position"] = shard["position"] - mesh.offset
        dtype = weight_dtype(self.inference.precision)
        parameters = mesh.attrs.get("parameters") or {}
        inputs = self.normalizer.encode_inputs(shard, mesh.offset, dtype, parameters)
        outputs = run_model(self.model, inputs, self.inference)
        bounds = [shard_bounds(num_rows, self.topology.cp, r) for r in range(self.topology.cp)]
        return gather_in_source_order(
            self.normalizer.decode_targets(outputs),
            np.arange(first, last),
            [stop - start for start, stop in bounds],
            self.topology.cp_comm,
        )

    def _forces(
        self, name: str, mesh: Mesh, fields: Fields, constants: Mapping[str, Any]
    ) -> dict[str, float] | None:
        """Coefficients of a predicted mesh; None, with a notice, without the constants for them."""
        sign = mesh.attrs.get("shear_sign", self.field_map.get("shear_sign"))
        if not isinstance(sign, int) or "pressure" not in fields or "wall_shear" not in fields:
            logger.warning("notice: %s: no forces without pressure, wall shear and its sign", name)
            return None
        if any(constants.get(key) is None for key in ("speed", "rho", "area")):
            logger.warning(
                "notice: %s: no force coefficients without reference constants; give --ref-area "
                "and --speed",
                name,
            )
            return None
        reference = Reference.from_mapping(name, constants)
        sums = integrate({**mesh.fields, **fields}, shear_sign=sign, centre=reference.centre)
        return coefficients(sums, reference)

    def _progress(self, items: Sequence[Any]) -> Iterator[Any]:
        """The items one after another; before each of them a signal may stop all ranks."""
        lifeline = self.topology.lifeline
        for item in tqdm(items, disable=not show_progress(self.topology.rank), unit="case"):
            why = self.topology.stop.agree(self.topology.world_comm, self.topology.device)
            if why is not None:
                if self.topology.rank == 0:
                    logger.info("stopped on %s before case %s", why, item)
                raise Stopped(why)
            lifeline.place = f"case {item}"
            yield item
        lifeline.place = ""


def _place_of(case: Case, source: Path | None, patterns: Sequence[str]) -> Path | None:
    """Where a case's mesh should be; None where its store does not say."""
    recorded = case.attrs.get("source")
    if source is None or recorded is None:
        return None if recorded is None else Path(recorded)
    return find_source(
        source,
        case.name,
        recorded=Path(recorded).name,
        patterns=patterns,
        digest=case.attrs.get("source_checksum"),
    )


def _sources_of(
    store: Store, cases: Sequence[str], source: Path | None, field_map: Mapping[str, Any]
) -> list[Path]:
    """The meshes to write the cases' predictions on, and all that the store was made from."""
    patterns = field_map.get("files") or ()
    found = [_place_of(store.case(name), source, patterns) for name in cases]
    recorded = [_place_of(store.case(name), None, ()) for name in store.cases]
    return [path for path in (*found, *recorded) if path is not None]


def _source_mesh(case: Case, source: Path | None, patterns: Sequence[str]) -> Path | str:
    """The case's mesh, or why there is none. A mesh that has changed since is an error."""
    path = _place_of(case, source, patterns)
    if path is None:
        return f"the store does not say where the mesh of case {case.name} is"
    if source is None:
        if path.exists() and path.suffix.lower() not in SUFFIXES:
            return f"the source {path} of case {case.name} has rows, but no mesh"
        if not path.is_file():
            return f"the mesh {path} of case {case.name} is gone (--source says where it is now)"
    size, digest = case.attrs.get("source_size"), case.attrs.get("source_checksum")
    files = parts(path)
    if size is not None and size_of(files) != size:
        changed = f"{size_of(files)} bytes where it had {size}"
    elif digest is not None and checksum_of(files) != digest:
        changed = "another checksum"
    else:
        return path
    raise DataError(
        f"mesh {path} of case {case.name} has changed since it was prepared ({changed}); prepare "
        "the store again or give the original with --source"
    )
