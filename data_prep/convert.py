"""Converts one source file into one case of a store; a failure comes back in one line."""

from __future__ import annotations

import errno
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cpflare.data.store_writer import StoreWriter
from cpflare.errors import DataError
from cpflare.files import one_line
from data_prep import layouts
from data_prep.fields import FieldMap
from data_prep.parameters import read_parameters
from data_prep.read import load_case
from data_prep.rows import load_rows
from data_prep.sources import record_of

# What the store's disk says to every case alike.
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG)


class Unwritable(str):
    """The reason why the store cannot be written: not the case's fault, so that no other helps."""


Outcome = dict[str, Any] | str  # a case's attributes, or why it failed


def convert_case(
    writer: StoreWriter, name: str, path: Path, field_map: FieldMap, threads: int
) -> Outcome:
    """Read one source and write its case; the attributes, or the reason of a failure."""
    try:
        with ThreadPoolExecutor(1) as pool:
            record = pool.submit(record_of, path, field_map)
            if layouts.is_layout(path):
                case = load_rows(path, field_map)
            else:
                case = load_case(path, field_map, threads=threads)
            attrs = {**case.attrs, "source": str(path.absolute())}
            attrs["parameters"] = read_parameters(path, field_map)
            attrs["contributing"] = record.result()
            attrs["source_size"] = attrs["contributing"]["mesh"]["size"]
            attrs["source_checksum"] = attrs["contributing"]["mesh"]["checksum"]
    except DataError as error:
        return str(error)
    except Exception as error:  # whatever it is, it must not take the other cases down
        return f"{path}: {type(error).__name__}: {one_line(error)}"
    try:
        return writer.write_case(
            name,
            case.fields,
            association=case.association,
            offset=case.offset,
            attrs=attrs,
            threads=threads,
        )
    except DataError as error:
        cause = error.__cause__
        is_disk = isinstance(cause, OSError) and cause.errno in _DISK
        return Unwritable(error) if is_disk else str(error)
    except Exception as error:
        return f"{path}: {type(error).__name__}: {one_line(error)}"
