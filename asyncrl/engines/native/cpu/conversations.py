"""Keys and values of conversations between two turns.

A row is given to others as soon as its request has ended, so what the next turn goes on from is copied aside. A
conversation may have branches, each of which is kept. The one that has waited longest goes first where there are more
tokens than the running rows have room for.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asyncrl.engines.native.sampling import Column

Saved = npt.NDArray[np.uint8]


class _Kept(NamedTuple):
    conversation: str
    tokens: Column
    saved: Saved


class Conversations:
    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        """The one that has waited longest is first."""

    def keep(self, conversation: str, tokens: Column, saved: Saved, room: int) -> None:
        """`room` for so many tokens in all."""
        others = [
            kept
            for kept in self._kept
            if kept.conversation != conversation or _common(kept.tokens, tokens) < len(kept.tokens)
        ]
        self._kept = [*others, _Kept(conversation, tokens, saved)]
        held = sum(len(kept.tokens) for kept in self._kept)
        while held > room:
            held -= len(self._kept.pop(0).tokens)

    def find(self, conversation: str, tokens: Column) -> tuple[int, Saved] | None:
        """How many of the first tokens are kept, and what to copy."""
        own = [kept for kept in self._kept if kept.conversation == conversation]
        if not own:
            return None
        length, best = max(((_common(kept.tokens, tokens), kept) for kept in own), key=lambda found: found[0])
        return (length, best.saved) if length else None

    def forget(self) -> None:
        self._kept.clear()


def _common(one: Column, other: Column) -> int:
    """Length of the common beginning."""
    shorter = min(len(one), len(other))
    different = (one[:shorter] != other[:shorter]).nonzero()[0]
    return int(different[0]) if len(different) else shorter
