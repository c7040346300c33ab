"""Prepared cases: the store, and how training reads it."""

from cpflare.data.store import Case, Store

__all__ = ["Case", "Store"]
