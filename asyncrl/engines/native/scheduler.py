"""Which tokens a step computes: every row advances by at least one, rows that lag by a chunk.

The last token of every row of a step forms the first part of the flat batch, so that decoding rows and the ends of
prefill chunks are the same thing. The chunk budget counts padded tokens (rows times the longest chunk), which bounds
the time of a step whatever the mix of prompt lengths.
"""

from collections import deque
from typing import NamedTuple

import numpy as np

from asyncrl.engines.cooperative import Job
from asyncrl.engines.native.cache import Chunk, KvCache
from asyncrl.engines.native.sampling import Column
from asyncrl.engines.native.slots import SlotTable


class Step(NamedTuple):
    """The flat batch of one step."""

    tokens_T: Column
    positions_T: Column
    end_N: Column
    """Computed tokens of each row after the step."""
    chunks: list[Chunk]
    reach: int
    """The longest row after the step."""


class Scheduler:
    """Admits waiting jobs, shares prompts and plans steps. Rows and cache are changed only here."""

    def __init__(self, slots: SlotTable, cache: KvCache, waiting: deque[Job], max_rows: int, chunk: int) -> None:
        self._slots, self._cache, self._waiting = slots, cache, waiting
        self._max_rows, self._chunk = max_rows, chunk
        self._lagging: list[Job] = []
        self._leaders: dict[tuple[int, ...], Job] = {}

    def plan(self) -> Step:
        while self._waiting and self._slots.count < self._max_rows:
            job = self._waiting.popleft()
            self._slots.append(job)
            self._enter(job)
        slots = self._slots
        chunks = self._chunks() if self._lagging else []
        positions_T = slots.computed[: slots.count].copy()
        for chunk in chunks:
            positions_T[chunk.row] = chunk.end
        end_N = positions_T + 1
        reach = int(end_N.max())
        self._cache.reserve(slots.count, reach)
        tokens_T = slots.tokens[slots.index[: slots.count], positions_T]
        if chunks:
            positions_T = np.concatenate([positions_T, *(np.arange(c.start, c.end) for c in chunks)])
            tokens_T = np.concatenate([tokens_T, *(slots.tokens[c.row, c.start : c.end] for c in chunks)])
        return Step(tokens_T, positions_T, end_N, chunks, reach)

    def release(self, job: Job) -> None:
        """Give the row to the next waiting job, or close the hole with the last row."""
        row, job.row = job.row, -1
        if self._leaders.get(job.request.tokens) is job:
            del self._leaders[job.request.tokens]
        if self._waiting:
            successor = self._waiting.popleft()
            self._slots.place(successor, row)
            self._enter(successor)
            return
        last = self._slots.count - 1
        if row != last:
            self._cache.copy(last, row, int(self._slots.computed[last]))
        self._slots.remove_last_into(row)

    def forget_prompts(self) -> None:
        """After a weight update, keys and values computed before it must not be shared with new jobs."""
        self._leaders.clear()
        for job in self._slots.jobs:
            job.leader = None

    def recompute(self) -> int:
        """Let every row prefill again what it had computed; returns how many tokens that is."""
        computed_N = self._slots.computed[: self._slots.count]
        again = int(computed_N.sum())
        computed_N[:] = 0
        self._lagging = list(self._slots.jobs)
        return again

    def _enter(self, job: Job) -> None:
        job.leader = self._leaders.setdefault(job.request.tokens, job)
        self._lagging.append(job)

    def _chunks(self) -> list[Chunk]:
        """Extra tokens of rows that lag, first come first served, within the budget."""
        slots, chunks, width = self._slots, list[Chunk](), 0
        self._cache.reserve(slots.count, 1)  # `_follows` may copy a shared prompt into a new row
        self._lagging = [job for job in self._lagging if job.row >= 0 and self._lag(job) > 1]
        for job in self._lagging:
            if self._follows(job):
                continue
            start = int(slots.computed[job.row])
            width = max(width, min(self._lag(job) - 1, self._chunk))
            if chunks and (len(chunks) + 1) * width > self._chunk:
                break
            chunks.append(Chunk(job.row, start, min(start + width, int(slots.known[job.row]) - 1)))
        return chunks

    def _lag(self, job: Job) -> int:
        return int(self._slots.known[job.row] - self._slots.computed[job.row])

    def _follows(self, job: Job) -> bool:
        """Whether the prompt comes from the leader: copied now if it is there, or soon."""
        leader, row, needed = job.leader, job.row, len(job.request.tokens) - 1
        if leader is None or leader is job or leader.row < 0:
            return False
        if self._slots.computed[leader.row] < needed:
            return True
        self._cache.copy(leader.row, row, needed)
        self._slots.computed[row] = needed
        job.leader = None
        return True
