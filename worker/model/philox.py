"""Philox4x32-10: random numbers as a pure function of a key and a counter."""

from __future__ import annotations

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_ROUNDS = 10

SAMPLE_STREAM = 0
"""Third counter word of the numbers that choose tokens; other uses of randomness take other streams."""


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four random 32-bit words for four counter words and two key words, each 0 .. 2**32 - 1.

    Algorithm: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), 10 rounds.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & _MASK,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int, stream: int = SAMPLE_STREAM) -> float:
    """A number of the open interval (0, 1), multiple of 2**-49, for one position of one seeded sequence.

    Args:
        seed: the request's seed, 0 .. 2**64 - 1; low and high half are the key.
        position: absolute position in the sequence of the token that the number chooses, 0 .. 2**64 - 1.
        stream: which of the independent numbers of this position, 0 .. 2**32 - 1.
    """
    high, low, _, _ = philox4x32((position & _MASK, position >> 32, stream, 0), (seed & _MASK, seed >> 32))
    return ((high << 16 | low >> 16) + 0.5) * 2.0**-48
