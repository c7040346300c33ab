"""Which cases a run takes, and whether each has what it needs."""

from __future__ import annotations

from collections.abc import Sequence

from cpflare.config import Config
from cpflare.data.store import Store
from cpflare.errors import DataError


def check_fields(store: Store, cases: Sequence[str], config: Config) -> None:
    """Every case must hold every input and target before the first step is taken."""
    for name in cases:
        case = store.case(name)
        for key, fields in (
            ("data.inputs", config.data.inputs),
            ("data.targets", config.data.targets),
            ("data.condition", config.data.condition),
        ):
            present = [field for field in fields if field in case.fields]
            if len(present) < len(fields):
                absent = ", ".join(field for field in fields if field not in present)
                mend = f"set '{key}=[{','.join(present)}]'" if present else f"change {key}"
                raise DataError(
                    f"case {name} of store {store.path} has no field {absent} ({key}); it has "
                    f"{', '.join(case.fields)}; {mend}, or prepare it with that field"
                )
        wanted = config.data.parameters
        if unknown := [name for name in wanted if name not in case.parameters]:
            known = ", ".join(case.parameters) or "none"
            raise DataError(
                f"case {name} of store {store.path} has no parameter {', '.join(unknown)} "
                f"(data.parameters); it has {known}; name those, or prepare it with a table of "
                "parameters (`parameters` in the field map)"
            )


def split_cases(
    store: Store, split: str | list[str], key: str, *, empty: bool = False
) -> tuple[str, ...]:
    """The cases of a split's name or of a list, each known to the store."""
    cases = store.split(split) if isinstance(split, str) else tuple(split)
    for name in cases:
        store.case(name)
    if not cases and not empty:
        raise DataError(f"{key}={split} has no cases in store {store.path}; name another split")
    return cases
