"""The embedded data set: made and prepared where it is absent, so that nothing is downloaded."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from cpflare.config import DataConfig
from cpflare.data.store import MARK
from cpflare.errors import DataError
from cpflare.files import written_aside

logger = logging.getLogger("cpflare")

EMBEDDED = "quickstart"
CASES, CELLS, SEED = 64, 6000, 0


def is_embedded(store: str | Path) -> bool:
    """Whether this is where the embedded data set belongs: the default of `data.store`, and there
    alone, so that it never takes the place of what somebody meant by another name."""
    return Path(store) == Path(DataConfig().store)


def ensure_embedded_store(
    store: str | Path, *, cases: int | None = None, cells: int | None = None
) -> None:
    """Make the embedded data set beside `store` and prepare it, unless the store is there.

    `cases` and `cells` are those of the quickstart where they are not given.

    Raises:
        DataError: a case could not be prepared.
    """
    # Training that has a store needs none of it.
    from data_prep.cars.synthetic import synthesise
    from data_prep.vtp_to_zarr import prepare

    store, cases, cells = Path(store), cases or CASES, cells or CELLS
    if (store / MARK).is_file():
        return
    source = store.parent / "source"
    held = {path.name for path in store.iterdir()} if store.is_dir() else set()
    own = {"zarr.json", *(f"run_{number}" for number in range(1, cases + 1))}
    others = {name for name in held if name not in own and not name.startswith(".")}
    if others or (held and not (source.is_dir() and "zarr.json" in held)):
        raise DataError(
            f"store {store} is a folder of other things; name another data.store, or empty it"
        )
    logger.info("making the embedded data set: %d cases of about %d cells", cases, cells)
    synthesise(source, cases=cases, cells=cells, seed=SEED)
    summary = prepare([source], store, dataset="drivaerml", split_seed=SEED, seed=SEED)
    if not summary.ok:
        case, reason = next(iter(summary.failed.items()))
        raise DataError(f"embedded case {case} could not be prepared: {reason}")
    mark = json.loads((store / MARK).read_text())
    with written_aside(store / MARK) as aside:
        aside.write_text(json.dumps({**mark, "embedded": True}, indent=1))
