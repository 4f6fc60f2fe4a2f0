"""One hash for every derived seed: `mix(seed, epoch, index)` and friends. Pure Python, the same on every machine."""

from __future__ import annotations

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15


def mix(*values: int) -> int:
    """A seed in [0, 2**63) that depends on every value, on their order and on how many there are.

    One round of splitmix64's finalizer per value, about 0.4 us each. Values are taken modulo 2**64; negative ones are
    allowed. Not cryptographic. The result never changes between versions: checkpoints and recorded runs rely on it.
    """
    state = _STEP * (len(values) + 1) & _MASK
    for value in values:
        state = (state ^ (value & _MASK)) + _STEP & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1
