"""In which order the rows of an epoch come: a pure function of (seed, epoch, rows), never of rank or world size.

"shuffle" is a keyed Feistel network over the smallest power of two that holds the rows, with cycle walking: position p
is encrypted until the result is below `rows`. That is a bijection by construction, needs no memory beyond the positions
asked for, and any range of any epoch can be had without the ranges before it: a resume costs nothing at 10**9 rows.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from evener.dist.mix import mix
from evener.errors import DataError

Indices = npt.NDArray[np.int64]
OrderFunction = Callable[[int, int], Any]

_M1, _M2, _S = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB), np.uint64(32)


class Order:
    """The order of `rows` rows under `seed`: "shuffle", "sequential", or `f(seed, epoch) -> indices`.

    A function may return a list, array or 1-D tensor of integers in 0 .. rows-1, of any length, with repeats. It is
    called once per epoch, must return the same on every rank, and its indices stay in memory for two epochs.

    Raises (when asked for an epoch):
        DataError: indices that are not integers in range.
    """

    def __init__(self, rows: int, seed: int, kind: str | OrderFunction = "shuffle") -> None:
        self.rows, self.seed, self.kind = rows, seed, kind
        self._made: dict[int, tuple[Indices, Indices]] = {}  # epoch -> (indices, keys) of a function's order

    def length(self, epoch: int) -> int:
        """How many rows epoch `epoch` has."""
        return len(self._function(epoch)[0]) if callable(self.kind) else self.rows

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """Row indices at positions start .. stop-1 of the epoch: a new int64 array, O(stop - start) time and memory."""
        if callable(self.kind):
            return self._function(epoch)[0][start:stop].copy()
        if self.kind == "sequential":
            return np.arange(start, stop, dtype=np.int64)
        return _feistel(np.arange(start, stop, dtype=np.uint64), self.rows, mix(self.seed, epoch, self.rows))

    def keys(self, epoch: int, start: int, stop: int, indices: Indices) -> Indices:
        """What tells two readings of the epoch apart, for per-row randomness: the row index, unless a row repeats.

        The n-th repeat of row i in the epoch has the key i + n * rows, so a row that an order function draws again and
        again (a weighted sampler) is not augmented the same way each time.
        """
        return self._function(epoch)[1][start:stop].copy() if callable(self.kind) else indices

    def _function(self, epoch: int) -> tuple[Indices, Indices]:
        if epoch not in self._made:
            indices = _checked(self.kind, self.seed, epoch, self.rows)
            while len(self._made) > 1:  # prefetch looks one epoch ahead of the epoch that trains
                del self._made[next(iter(self._made))]
            self._made[epoch] = indices, indices + self.rows * _repeats(indices)
        return self._made[epoch]


def _feistel(x: npt.NDArray[np.uint64], rows: int, key: int) -> Indices:
    bits = max(2, (rows - 1).bit_length())
    low_bits = bits // 2
    # A round changes one half of the bits. Eight are plenty for many rows; a handful of rows has halves of one or two
    # bits and needs up to 32 until all its permutations come equally often (chi-square over all n! for n <= 8).
    keys = [np.uint64(mix(key, i)) for i in range(max(8, 96 // bits))]
    x = _rounds(x, bits - low_bits, low_bits, keys)
    outside = np.flatnonzero(x >= rows)
    while outside.size:
        again = _rounds(x[outside], bits - low_bits, low_bits, keys)
        x[outside] = again
        outside = outside[again >= rows]
    return x.view(np.int64)


def _rounds(x: npt.NDArray[np.uint64], high_bits: int, low_bits: int, keys: list[np.uint64]) -> npt.NDArray[np.uint64]:
    high, low = x >> np.uint64(low_bits), x & np.uint64((1 << low_bits) - 1)
    high_shift, low_shift = np.uint64(64 - high_bits), np.uint64(64 - low_bits)
    f, t = np.empty_like(x), np.empty_like(x)  # reused: fresh pages would cost more than the arithmetic
    for i, key in enumerate(keys):
        source, target, shift = (low, high, high_shift) if i % 2 == 0 else (high, low, low_shift)
        np.add(source, key, out=f)
        np.multiply(f, _M1, out=f)
        np.right_shift(f, _S, out=t)
        np.bitwise_xor(f, t, out=f)
        np.multiply(f, _M2, out=f)
        np.right_shift(f, shift, out=f)  # the top bits are the best mixed ones
        np.bitwise_xor(target, f, out=target)
    np.left_shift(high, np.uint64(low_bits), out=high)
    high |= low
    return high


def _checked(function: Any, seed: int, epoch: int, rows: int) -> Indices:
    what = f"order(seed={seed}, epoch={epoch})"
    try:
        given = function(seed, epoch)
    except Exception as error:
        fix = ["order= is a function of (seed, epoch) that returns row numbers"]
        raise DataError(f"{what} failed: {type(error).__name__}: {error}", evidence=where(error), fix=fix) from error
    fix = [f"return a flat list, array or tensor of integers from 0 to {rows - 1}"]
    try:
        array = given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else np.asarray(given)
    except (TypeError, ValueError) as error:  # a ragged list
        raise DataError(f"{what} did not return indices.", evidence=[str(error)], fix=fix) from None
    evidence: list[str] = []
    if array.shape == (0,):
        problem = "returned no rows."
    elif array.ndim != 1 or array.dtype.kind not in "iu":
        problem = "did not return flat integer indices."
        evidence = [f"got {type(given).__name__} of shape {array.shape}, dtype {array.dtype}"]
    elif (wrong := np.flatnonzero((array < 0) | (array >= rows))).size:
        problem = f"returned {wrong.size} indices outside of the {rows} rows."
        evidence = [f"position {wrong[0]}: {array[wrong[0]]}"]
    else:
        return array.astype(np.int64, copy=True)
    raise DataError(f"{what} {problem}", evidence=evidence, fix=fix)


def where(error: Exception) -> list[str]:
    """The innermost line of the error outside of this room."""
    here = os.path.dirname(__file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if os.path.dirname(f.filename) != here]
    return [f"at {frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}"] if frames else []


def _repeats(indices: Indices) -> Indices:
    """For each position, how often its index came before in the epoch."""
    order = np.argsort(indices, kind="stable")
    ordered = indices[order]
    first = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    positions = np.arange(len(indices), dtype=np.int64)
    repeats = np.empty_like(indices)
    repeats[order] = positions - np.maximum.accumulate(np.where(first, positions, 0))
    return repeats
