"""Converts one source file into one case of a store; a failure comes back in one line."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cpflare.data.store_writer import StoreWriter
from cpflare.errors import DataError
from cpflare.files import checksum, one_line
from data_prep import layouts
from data_prep.fields import FieldMap
from data_prep.parameters import read_parameters
from data_prep.read import load_case
from data_prep.rows import load_rows

Outcome = dict[str, Any] | str  # a case's attributes, or why it failed


def convert_case(
    writer: StoreWriter, name: str, path: Path, field_map: FieldMap, threads: int
) -> Outcome:
    """Read one source and write its case; the attributes, or the reason of a failure."""
    try:
        with ThreadPoolExecutor(1) as pool:
            digest = pool.submit(source_checksum, path)
            if layouts.is_layout(path):
                case = load_rows(path, field_map)
            else:
                case = load_case(path, field_map, threads=threads)
            attrs = {**case.attrs, "source": str(path.absolute())}
            attrs["parameters"] = read_parameters(path, field_map)
            attrs["source_checksum"] = digest.result()
        return writer.write_case(
            name,
            case.fields,
            association=case.association,
            offset=case.offset,
            attrs=attrs,
            threads=threads,
        )
    except DataError as error:
        return str(error)
    except Exception as error:  # whatever it is, it must not take the other cases down
        return f"{path}: {type(error).__name__}: {one_line(error)}"


def source_checksum(path: Path) -> str:
    """SHA-256 of a file; of a source of several files, of their checksums."""
    files = layouts.parts(path)
    if len(files) == 1:
        return checksum(files[0])
    return hashlib.sha256(" ".join(checksum(f) for f in files).encode()).hexdigest()


def source_size(path: Path) -> int:
    """Bytes of all files of a source."""
    return sum(p.stat().st_size for p in layouts.parts(path))
