"""Which tokens a step computes: every row advances by at least one, rows that lag by a chunk.

The last token of every row of a step forms the first part of the flat batch, so that decoding rows and the ends of
prefill chunks are the same thing. Where rows have drafts, all rows get columns for the longest of them. The chunk
budget counts padded tokens (rows times the longest chunk), which bounds the time of a step whatever the mix of prompt
lengths.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from asyncrl.engines.cooperative import Job
from asyncrl.engines.native.batch_table import BatchTable
from asyncrl.engines.native.cpu.cache import Branches, Chunk, KvCache, Layout
from asyncrl.engines.native.cpu.conversations import Conversations
from asyncrl.engines.native.sampling import Column
from asyncrl.engines.native.verification import DraftTable


class Step(NamedTuple):
    """The flat batch of one step."""

    tokens_T: Column
    positions_T: Column
    end_N: Column
    """Computed tokens of each row after the step, not counting drafts."""
    layout: Layout


class Scheduler:
    """Admits waiting jobs, shares prompts and plans steps. Rows and cache are changed only here."""

    def __init__(
        self,
        slots: BatchTable,
        caches: Sequence[KvCache],
        waiting: deque[Job],
        max_rows: int,
        chunk: int,
        *,
        reuse: bool = True,
    ) -> None:
        """`reuse`: the next turn of a conversation finds what the turns before it have computed."""
        self._conversations = Conversations() if reuse else None
        self._mixed = set[Job]()
        """Jobs with keys and values of several policy versions."""
        self.cached = 0
        """Tokens of prompts whose keys and values were there already."""
        self._slots, self._caches, self._waiting = slots, caches, waiting
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
        if slots.drafts is not None and (width := slots.drafts.width(slots.count)) > 1:
            return self._wide(end_N, width, chunks, slots.drafts)
        reach = int(end_N.max())
        self._reserve(reach)
        tokens_T = slots.tokens[slots.index[: slots.count], positions_T]
        if chunks:
            tokens_T, positions_T = self._join(chunks, tokens_T, positions_T)
        return Step(tokens_T, positions_T, end_N, Layout(positions_T, slots.count, reach, chunks))

    def _wide(self, end_N: Column, width: int, chunks: list[Chunk], drafts: DraftTable) -> Step:
        """Rows without a draft compute garbage in its columns."""
        slots = self._slots
        rows, base_N = slots.count, end_N - 1
        reach = int(end_N.max()) + width - 1
        self._reserve(reach)
        slots_N_W = base_N[:, None] + np.arange(width)
        tokens_N_W = np.empty((rows, width), np.int64)
        tokens_N_W[:, 0] = slots.tokens[slots.index[:rows], base_N]
        tokens_N_W[:, 1:] = drafts.tokens[:rows, : width - 1]
        positions_N_W, branches = slots_N_W, None
        if drafts.is_tree:
            positions_N_W = np.repeat(base_N[:, None], width, 1)
            positions_N_W[:, 1:] += drafts.depth[:rows, : width - 1]
            branches = Branches(base_N, drafts.ancestors(rows, width)[:, :, 1:])
        tokens_T, slots_T = self._join(chunks, tokens_N_W.ravel(), slots_N_W.ravel())
        positions_T = slots_T if branches is None else self._join(chunks, tokens_T, positions_N_W.ravel())[1]
        return Step(tokens_T, positions_T, end_N, Layout(slots_T, rows, reach, chunks, width, branches))

    def release(self, job: Job) -> None:
        """Give the row to the next waiting job, or close the hole with the last row."""
        self._keep(job)
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
            self._copy(last, row, int(self._slots.computed[last]))
        self._slots.remove_last_into(row)

    def forget_prompts(self) -> None:
        """After a weight update, keys and values computed before it must not be shared with new jobs."""
        self._leaders.clear()
        if self._conversations is not None:
            self._conversations.forget()
        self._mixed = {job for job in self._slots.jobs if self._slots.computed[job.row]}
        for job in self._slots.jobs:
            job.leader = None

    def recompute(self) -> int:
        """Let every row prefill again what it had computed; returns how many tokens that is."""
        computed_N = self._slots.computed[: self._slots.count]
        again = int(computed_N.sum())
        computed_N[:] = 0
        self._mixed.clear()
        if self._slots.drafts is not None:
            self._slots.drafts.clear()
        self._lagging = list(self._slots.jobs)
        return again

    def _enter(self, job: Job) -> None:
        job.leader = self._leaders.setdefault(job.request.tokens, job)
        self._lagging.insert(0 if job.request.ahead else len(self._lagging), job)
        if self._conversations is not None and job.request.conversation and job.leader is job:
            self._go_on(job, self._conversations)

    def _go_on(self, job: Job, conversations: Conversations) -> None:
        """From where the turn before has ended, if that is kept."""
        slots, row = self._slots, job.row
        # Tokens that are not computed have no routes: only those that were returned before may be skipped.
        most = int(slots.known[row]) - 1 if slots.routes is None else int(slots.routed[row])
        if (found := conversations.find(job.request.conversation, slots.tokens[row, :most])) is not None:
            length, saved = found
            self._reserve(length)
            self._caches[0].restore(saved, row, length)
            slots.computed[row] = length
            self.cached += length

    def _keep(self, job: Job) -> None:
        """What the row has computed, if a turn may follow, and if it was under the present weights alone."""
        mixed = job in self._mixed
        self._mixed.discard(job)
        if self._conversations is None or mixed or not job.request.conversation:
            return
        slots, row = self._slots, job.row
        length = min(int(slots.computed[row]), int(slots.known[row]))
        if length:
            rows, reach = self._caches[0].shape
            saved = self._caches[0].save(row, length)
            self._conversations.keep(job.request.conversation, slots.tokens[row, :length].copy(), saved, rows * reach)

    def _chunks(self) -> list[Chunk]:
        """Extra tokens of rows that lag, first come first served, within the budget."""
        slots, chunks, width = self._slots, list[Chunk](), 0
        self._reserve(1)  # `_follows` may copy a shared prompt into a new row
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
        self._copy(leader.row, row, needed)
        self._slots.share_prompt(leader.row, row, needed)
        self.cached += needed
        job.leader = None
        return True

    def _join(self, chunks: list[Chunk], tokens_T: Column, positions_T: Column) -> tuple[Column, Column]:
        """Tokens and positions of rows with those of chunks behind them."""
        tokens = [self._slots.tokens[c.row, c.start : c.end] for c in chunks]
        positions = [np.arange(c.start, c.end) for c in chunks]
        return np.concatenate([tokens_T, *tokens]), np.concatenate([positions_T, *positions])

    def _reserve(self, reach: int) -> None:
        for cache in self._caches:
            cache.reserve(self._slots.count, reach)

    def _copy(self, source: int, target: int, length: int) -> None:
        for cache in self._caches:
            cache.copy(source, target, length)
