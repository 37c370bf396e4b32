"""Drafts by lookup: what followed the last few tokens earlier in the same text, or in an answer to the same prompt.

All texts with the same prompt share one index from runs of tokens to the place behind their newest occurrence. A run
is indexed when the token behind it is known, so a text does not find its own end. The prompt is indexed once for all.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from asyncrl.config.drafter import NgramDrafter, Strategy
from asyncrl.engines.cooperative import Job
from asyncrl.engines.native.batch_table import BatchTable
from asyncrl.engines.native.sampling import Column
from asyncrl.engines.native.speculation.source import Seen, Taps

_GROUPS = 256
"""Prompts whose answers are remembered after all of them have ended."""

Place = tuple[list[int], int]
"""A text and a position in it."""


class Group:
    """The texts with one prompt."""

    def __init__(self, prompt: Sequence[int], shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._behind: dict[tuple[int, ...], Place] = {}
        self._prompt: list[int] = []
        self.extend(self._prompt, prompt)

    def text(self) -> list[int]:
        """Of a new answer."""
        return self._prompt.copy()

    def extend(self, text: list[int], tokens: Sequence[int]) -> None:
        """Append to a text of the group."""
        for token in tokens:
            end = len(text)
            for length in range(self._shortest, min(self._longest, end) + 1):
                self._behind[tuple(text[end - length :])] = text, end
            text.append(token)

    def draft(self, text: list[int], depth: int) -> list[int]:
        """Up to `depth` tokens; where one place has no more to give, the lookup goes on behind what it gave."""
        tail, found = text[-self._longest :], list[int]()
        while len(found) < depth and (place := self._find(tail)) is not None:
            source, begin = place
            more = source[begin : begin + depth - len(found)]
            found += more
            tail = (tail + more)[-self._longest :]
        return found

    def _find(self, tail: list[int]) -> Place | None:
        """The place behind the longest run that the tail ends with."""
        for length in range(len(tail), self._shortest - 1, -1):
            place = self._behind.get(tuple(tail[-length:]))
            if place is not None:
                return place
        return None


class Ngram:
    taps: Taps | None = None

    def __init__(self, settings: NgramDrafter) -> None:
        self._settings = settings
        self._groups: OrderedDict[tuple[int, ...], Group] = OrderedDict()
        self._texts: dict[Job, tuple[Group, list[int]]] = {}

    def draft(self, slots: BatchTable, strategy: Strategy, seen: Seen) -> None:
        self.look_up(slots, strategy.depth, seen.ready_N)

    def look_up(self, slots: BatchTable, depth: int, ready_N: Column) -> None:
        """Drafts for the rows that are ready."""
        assert slots.drafts is not None
        rows = slots.count
        tokens_N_C, count_N = np.zeros((rows, depth), np.int64), np.zeros(rows, np.int64)
        self._texts = {job: self._texts.get(job) or self._begin(job) for job in slots.jobs}
        for row, (job, ready) in enumerate(zip(slots.jobs, ready_N.tolist(), strict=True)):
            if ready:
                group, text = self._texts[job]
                group.extend(text, slots.tokens[row, len(text) : slots.known[row]].tolist())
                found = group.draft(text, depth)
                count_N[row], tokens_N_C[row, : len(found)] = len(found), found
        slots.drafts.hold_chains(tokens_N_C, count_N)

    def _begin(self, job: Job) -> tuple[Group, list[int]]:
        prompt = job.request.tokens[: len(job.request.tokens) - job.request.resumed]
        group = self._groups.pop(prompt, None) or Group(prompt, self._settings.min_match, self._settings.max_match)
        self._groups[prompt] = group
        if len(self._groups) > _GROUPS:
            self._groups.popitem(last=False)
        return group, group.text()
