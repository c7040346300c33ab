"""Executors: how the blocks of a model are run."""

from cpflare.engine.configure import configure, predicting
from cpflare.engine.parallelize import parallelize

__all__ = ["configure", "parallelize", "predicting"]
