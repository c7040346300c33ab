"""Operations: exact encode and decode over any number of ranks, and the reductions."""

from cpflare.ops.encode import decode, encode
from cpflare.ops.reduce import Reducer

__all__ = ["Reducer", "decode", "encode"]
