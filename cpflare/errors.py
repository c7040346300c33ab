"""What a user can cause: one line with what was wrong, the value, and the mend."""

from __future__ import annotations


class CpflareError(ValueError):
    """Base of every error that a user can cause; commands print it as one line and exit with 2."""


class ConfigError(CpflareError):
    """A configuration key or value that cannot be used."""


class DataError(CpflareError):
    """A file, store, case or field that is missing, damaged or of the wrong shape."""


class TopologyError(CpflareError):
    """A number of ranks that does not fit the configuration or the machine."""


class NonFiniteError(CpflareError):
    """A loss, gradient or prediction that is NaN or infinite."""
