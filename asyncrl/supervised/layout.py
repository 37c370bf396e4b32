"""The turns of one example as tokens, each of them once.

Where every turn goes on from the one before it, that is a line: what the model is given, what it should say, what it is
given then. A chat template that changes the history (one that leaves out earlier reasoning, above all) makes a tree of
it: each turn lies behind the tokens that a call would have had, and what turns have in common is there once.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from asyncrl.chat.messages import SaidTurn
from asyncrl.data.episodes import Places
from asyncrl.types import Branch, Episode, Ints, Segment, Slot, Trajectory, Turn

REWRITTEN = "rerendered"
"""Cause of a branch, in the words of the gateway: the template writes earlier turns otherwise."""


class Example(NamedTuple):
    uid: str
    tokens: Ints
    turns: tuple[tuple[int, int], ...]
    """Start and stop of what the model should say."""
    branches: tuple[Branch, ...]
    longest: int
    """Tokens of the longest conversation that a turn ends."""
    cut: bool

    @property
    def key(self) -> bytes:
        """The same for examples that teach the same."""
        return b"".join([self.tokens.tobytes(), np.array(self.turns, np.int64).tobytes()])

    @property
    def trained_tokens(self) -> int:
        return sum(stop - start for start, stop in self.turns)

    def trajectory(self, slot: Slot, version: int, now: float) -> Trajectory:
        """As if the policy of `version` had said what it should say. No policy has, so the log-probabilities are 0 and
        nothing may be derived from them: see `AlgorithmBase.on_data`."""
        episode = None
        if self.branches:
            episode = Episode(branches=self.branches, turns=tuple(Turn(start, stop) for start, stop in self.turns))
        return Trajectory(
            slot=slot,
            prompt=self.uid,
            segments=tuple(self._segments(version)),
            reward=0.0,
            finish="length" if self.cut else "stop",
            started=now,
            finished=now,
            engine="data",
            episode=episode,
        )

    def _segments(self, version: int) -> list[Segment]:
        bounds = [0, *(place for turn in self.turns for place in turn), len(self.tokens)]
        found = list[Segment]()
        for number, (start, stop) in enumerate(pairwise(bounds)):
            if start == stop:
                continue
            part = self.tokens[start:stop]
            said = number % 2
            found.append(Segment.sampled(part, np.zeros(len(part)), version) if said else Segment.given(part))
        return found


def longest(turns: Sequence[SaidTurn]) -> int:
    return max(len(turn.prompt) + len(turn.reply) for turn in turns)


def laid_out(uid: str, turns: Sequence[SaidTurn], most: int) -> Example | None:
    """The turns within the first `most` tokens of their conversations; None: nothing is left of what is said."""
    size, spans, branches = 0, list[tuple[int, int]](), list[Branch]()
    pieces, known = list[Ints](), list[tuple[Ints, Places]]()
    for turn in turns:
        given, said = turn.prompt[:most], turn.reply[: max(0, most - len(turn.prompt))]
        if not given:  # nothing is before the first token, by which it could be predicted
            given, said = said[:1], said[1:]
        if not said:
            continue
        prompt = np.array(given, np.int32)
        shared = _shared(prompt, known)
        fresh = np.concatenate([prompt[len(shared) :], np.array(said, np.int32)])
        after = int(shared[-1]) if len(shared) else -1
        if after != size - 1:
            branches.append(Branch(size, after, REWRITTEN))
        spans.append((size + len(fresh) - len(said), size + len(fresh)))
        known.append(
            (np.concatenate([prompt, fresh[len(fresh) - len(said) :]]), np.append(shared, _range(size, fresh)))
        )
        pieces.append(fresh)
        size += len(fresh)
    if not spans:
        return None
    return Example(
        uid, np.concatenate(pieces), tuple(spans), tuple(branches), longest(turns), cut=longest(turns) > most
    )


def _range(start: int, tokens: Ints) -> Places:
    return np.arange(start, start + len(tokens))


def _shared(prompt: Ints, known: Sequence[tuple[Ints, Places]]) -> Places:
    """Where the most that the prompt begins with lies already; the latest of equals."""
    found = np.zeros(0, np.int64)
    for tokens, places in known:
        length = min(len(prompt), len(tokens))
        differs = np.flatnonzero(tokens[:length] != prompt[:length])
        same = int(differs[0]) if len(differs) else length
        if same >= len(found):
            found = places[:same]
    return found
