"""Several endless streams as one, in fixed shares: which one a position belongs to, and which of its own it is.

A pattern of BLOCK positions repeats. In it, as after any number of positions, each stream is less than two behind or
ahead of its share. Both directions are arithmetic, so a position needs no other state.
"""

from collections.abc import Sequence

BLOCK = 1000
"""Positions of the pattern; shares are whole thousandths."""


class Interleaving:
    def __init__(self, weights: Sequence[float]) -> None:
        self._quotas = quotas(weights)
        self._pattern: list[tuple[int, int]] = []
        """For each position of a block the stream, and how many of its own come before."""
        self._places: list[list[int]] = [[] for _ in weights]
        """For each stream its positions."""
        streams = range(len(weights))
        for place in range(BLOCK):
            stream = max(streams, key=lambda s: self._quotas[s] * (place + 1) - len(self._places[s]) * BLOCK)
            self._pattern.append((stream, len(self._places[stream])))
            self._places[stream].append(place)

    @property
    def streams(self) -> list[int]:
        """Of the positions of a block."""
        return [stream for stream, _ in self._pattern]

    def locate(self, index: int) -> tuple[int, int]:
        """The stream of a position, and the position in it."""
        block, place = divmod(index, BLOCK)
        stream, before = self._pattern[place]
        return stream, block * self._quotas[stream] + before

    def index(self, stream: int, position: int) -> int:
        """The other way round."""
        block, before = divmod(position, self._quotas[stream])
        return block * BLOCK + self._places[stream][before]


def quotas(weights: Sequence[float]) -> list[int]:
    """Each stream's positions of a block: its share, rounded so that they fill it, and one at least."""
    exact = [BLOCK * weight / sum(weights) for weight in weights]
    found = [max(1, int(share)) for share in exact]
    while (missing := BLOCK - sum(found)) != 0:
        sign = 1 if missing > 0 else -1
        able = [s for s in range(len(found)) if found[s] > 1 or sign > 0]
        found[max(able, key=lambda s: sign * (exact[s] - found[s]))] += sign
    return found
