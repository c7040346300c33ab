"""Executors: how the blocks of a model are run."""

from cpflare.engine.parallelize import parallelize

__all__ = ["parallelize"]
