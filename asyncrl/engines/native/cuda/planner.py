"""Which tokens a step computes, while the step before is still running.

The host is one step behind: it plans step n+1 before it knows what step n has sampled. It need not know, because every
row that decodes gets exactly one token: positions and pages follow, and the token itself is taken on the device from
the result of step n (`source`). A row that has sampled a stop token is found out one step late; what was computed for
it in between is thrown away.

So `computed` counts here the tokens whose keys and values are written by a step that was launched, and `known` those
that the host has seen. Rows that lag are prefilled in tiles beside the rows that decode, and decode in the step that
computes their last tile. Rows without anything to do are padding.

With drafts the host reads each step before it plans the next, as that decides where rows go on; nothing is then running
(`verify` in place of `decode`). A drafting head's keys and values lie in the same pages, up to `head_computed`.

Where pages are short, the youngest row gives up its own and is computed again later; the oldest can always go on.

A row that begins looks for pages that hold its first tokens: the next turn of a conversation has those of the turns
before it, which ended here. Pages that were not written under the present weights alone are never found.
"""

from collections import deque
from collections.abc import Callable
from itertools import count

import numpy as np

from asyncrl.engines.cooperative import Job
from asyncrl.engines.native.batch_table import BatchTable
from asyncrl.engines.native.cuda.inputs import Fields, Shape
from asyncrl.engines.native.cuda.pages import Copy, PageTable, pages_of
from asyncrl.engines.native.cuda.routes import RoutePages
from asyncrl.engines.native.sampling import Column, Purpose

NONE = -1


class Planner:
    """Rows and pages are changed only here."""

    def __init__(
        self,
        slots: BatchTable,
        pages: PageTable,
        waiting: deque[Job],
        copy: Callable[[list[Copy]], None],
        *,
        tiles: int,
        tile: int,
        move: Callable[[int, int], None] | None = None,
        routes: RoutePages | None = None,
        reuse: bool = True,
    ) -> None:
        """`move` is told when a row becomes another one; `reuse` pages of earlier requests."""
        self._reuse, self._mixed = reuse, set[Job]()
        """Jobs with keys and values of several policy versions."""
        self._written: list[Job] = []
        """Jobs whose prompts the steps before have computed: others may find them from now on."""
        self.cached = 0
        """Tokens of prompts whose keys and values were there already."""
        self._routes = routes
        self._slots, self._pages, self._waiting, self._copy, self._move = slots, pages, waiting, copy, move
        self._max_rows, self._tiles, self._tile = len(slots.index), tiles, tile
        self.source = np.full(self._max_rows, NONE)
        """Where in the running step the next token of each row is sampled; NONE: its last token is known."""
        self._lagging: list[Job] = []
        self._leaders: dict[tuple[int, ...], Job] = {}
        self._ages, self._clock = dict[Job, int](), count()

    def admit(self) -> None:
        while self._waiting and self._slots.count < self._max_rows:
            job = self._waiting.popleft()
            self._slots.append(job)
            self._enter(job)

    @property
    def table(self) -> Column:
        """Pages of the rows."""
        return self._pages.table

    def make_room(self, ahead: int = 0) -> None:
        """Give rows that decode the pages of their next token, and of so many behind it."""
        next_N = self._next()
        reach_N = np.minimum(next_N + ahead, self._slots.limit[: self._slots.count])
        for row in (self._caught_up(next_N) & (reach_N > self._room())).nonzero()[0].tolist():
            if self._slots.computed[row] == next_N[row] - 1:  # not yet evicted for another
                self._reserve(row, int(reach_N[row]))

    def prefill(self, fields: Fields) -> int:
        """Fill in tiles for rows that lag, first come first served, and return how many."""
        if not self._lagging:
            return 0
        slots, used, copies = self._slots, 0, list[Copy]()
        for job in self._written:
            if job.row >= 0:  # else it was remembered as it ended
                self._remember(job)
        self._written.clear()
        before = slots.computed.copy()
        behind = (self._next() - before[: slots.count]).tolist()
        self._lagging = [job for job in self._lagging if job.row >= 0 and behind[job.row] > 1]
        for job in self._lagging:
            if used == self._tiles:
                break
            row, leader = job.row, self._leader(job)
            if leader is not None:
                if before[leader.row] < len(job.request.tokens) - 1:
                    continue  # its prompt is there soon
                copy = self._share(leader, job)
                if copy is None:
                    break
                copies += copy
                continue
            if not self._hold(job):
                break
            start = int(slots.computed[row])
            # The last token that is known waits for the one behind it, which a drafting head reads too.
            end = min(start + (self._tiles - used) * self._tile, int(slots.known[row]) - 1)
            if start < end:
                used += self._cut(fields, used, row, start, end)
                slots.computed[row] = slots.head_computed[row] = end
                if end == slots.known[row] - 1:
                    self._written.append(job)
        if copies:
            self._copy(copies)  # of pages that earlier steps have written, into pages that were free
        return used

    def decode(self, fields: Fields, padded: int) -> int:
        """Fill in the rows, up to the padding, and return how many of them sample a token."""
        slots, rows = self._slots, self._slots.count
        index_N, next_N, source_N = slots.index[:rows], self._next(), self.source[:rows]
        position_N = next_N - 1
        ready_N = self._caught_up(next_N) & (next_N <= self._room())
        known_N = slots.tokens[index_N, np.minimum(position_N, slots.known[:rows] - 1)]
        fields.token_X[:rows] = np.where(source_N == NONE, known_N, -1 - source_N)
        fields.token_X[rows:padded] = 0
        self._place_rows(fields, padded, position_N, ready_N)
        fields.plain_X[:rows] = slots.uniforms_of(Purpose.PLAIN, next_N[:, None])[:, 0]
        slots.computed[:rows][ready_N] += 1
        source_N[:] = np.where(ready_N, index_N, NONE)
        return int(ready_N.sum())

    def verify(self, fields: Fields, shape: Shape, depth: int) -> Column:
        """The same for a step of `shape.width` columns, which drafts `depth` tokens; returns which rows sample.

        Nothing is computed behind the last token that a row may have, nor behind its pages.
        """
        slots, rows, width = self._slots, self._slots.count, shape.width
        assert slots.drafts is not None
        known_N = slots.known[:rows]
        start_N, room_N = known_N - 1, np.minimum(self._room(), slots.limit[:rows])
        ready_N = self._caught_up(known_N) & (known_N <= self._room())
        left_N = np.where(ready_N, np.minimum(slots.limit[:rows] - known_N, room_N - start_N), 0)
        drafted_N = np.minimum(slots.drafts.count[:rows] if width > 1 else 0, left_N)
        self._place_rows(fields, shape.rows, start_N, np.minimum(drafted_N + 1, left_N))
        fields.drafted_N[:rows], fields.drafted_N[rows : shape.rows] = drafted_N, 0
        fields.room_N[:rows] = room_N
        token_N_W = fields.token_X[: shape.rows * width].reshape(shape.rows, width)
        token_N_W[:rows, 0] = slots.tokens[slots.index[:rows], start_N]
        token_N_W[:rows, 1:] = slots.drafts.tokens[:rows, : width - 1]
        token_N_W[rows:] = 0
        next_N_W = known_N[:, None] + np.arange(width)
        purposes = {Purpose.PLAIN: fields.plain_X}
        if width > 1:
            purposes |= {Purpose.ACCEPT: fields.accept_X, Purpose.RESIDUAL: fields.residual_X}
        for purpose, uniform_X in purposes.items():
            uniform_X[: rows * width] = slots.uniforms_of(purpose, next_N_W).ravel()
        columns = width - 1 + depth
        fields.draft_N_C[:rows, :columns] = slots.uniforms_of(Purpose.DRAFT, known_N[:, None] + 1 + np.arange(columns))
        return ready_N

    def head_lag(self) -> int:
        """Tokens that a drafting head is behind, at most."""
        rows = slice(0, self._slots.count)
        return int((self._slots.computed[rows] - self._slots.head_computed[rows]).max(initial=0))

    def running(self) -> tuple[Column, Column]:
        """Rows whose token is in the running step, and where in its result."""
        rows_R = (self.source[: self._slots.count] != NONE).nonzero()[0]
        return rows_R, self.source[rows_R]

    def release(self, job: Job) -> None:
        """Give the row to the next waiting job, or close the hole with the last row."""
        self._remember(job)
        self._mixed.discard(job)
        row, job.row = job.row, NONE
        del self._ages[job]
        if self._leaders.get(job.request.tokens) is job:
            del self._leaders[job.request.tokens]
        self._pages.release(row)
        if self._waiting:
            self.source[row] = NONE
            successor = self._waiting.popleft()
            self._slots.place(successor, row)
            self._enter(successor)
            return
        last = self._slots.count - 1
        if row != last:
            self._pages.move(last, row)
            self.source[row] = self.source[last]
            if self._move is not None:
                self._move(last, row)
        self.source[last] = NONE
        self._slots.remove_last_into(row)

    def forget_prompts(self) -> None:
        """After a weight update, keys and values computed before it must not be shared with new jobs.

        Rows that have none yet go on sharing, behind the first of them: else each would compute the prompt for itself.
        """
        self._leaders.clear()
        self._pages.forget()
        self._mixed = {job for job in self._slots.jobs if not self._empty(job)}
        for job in sorted(self._slots.jobs, key=self._ages.__getitem__):
            job.leader = self._leaders.setdefault(job.request.tokens, job) if self._empty(job) else None

    def recompute(self) -> int:
        """Let every row prefill again what it had computed; returns how many tokens that is."""
        again = int(self._slots.computed[: self._slots.count].sum())
        for job in self._slots.jobs:
            self._evict(job)
        self.forget_prompts()  # behind it: what the rows gave up must not be found
        return again

    def _enter(self, job: Job) -> None:
        age, ahead = next(self._clock), job.request.ahead
        self._ages[job] = -age if ahead else age
        job.leader = self._leaders.setdefault(job.request.tokens, job)
        self._lagging.insert(0 if ahead else len(self._lagging), job)

    def _next(self) -> Column:
        """Index of the token that each row samples next."""
        rows = self._slots.count
        return self._slots.known[:rows] + (self.source[:rows] != NONE)

    def _caught_up(self, next_N: Column) -> Column:
        """Rows whose newest token is all that is left to compute, unless their last is being sampled already."""
        rows = self._slots.count
        return (self._slots.computed[:rows] == next_N - 1) & (next_N < self._slots.limit[:rows])

    def _room(self) -> Column:
        """Tokens that the rows have pages for."""
        return self._pages.held[: self._slots.count] * self._pages.page

    def _place_rows(self, fields: Fields, padded: int, start_N: Column, count_N: Column) -> None:
        rows = self._slots.count
        fields.start_N[:rows] = start_N
        fields.count_N[:rows] = count_N
        fields.count_N[rows:padded] = 0
        fields.temperature_N[:rows] = self._slots.temperature[:rows]
        fields.table_N_P[:rows] = self._pages.table[:rows]

    def _leader(self, job: Job) -> Job | None:
        """Whose prompt the row takes over, if it has nothing yet."""
        leader = job.leader
        return leader if leader is not None and leader is not job and leader.row >= 0 and self._empty(job) else None

    def _empty(self, job: Job) -> bool:
        return not self._pages.held[job.row]

    def _share(self, leader: Job, job: Job) -> list[Copy] | None:
        """Take over a prompt that an earlier step has computed; returns the copies that are still to be made."""
        row, length = job.row, len(job.request.tokens) - 1
        copies = self._pages.share(leader.row, row, length)
        if copies is None or not self._pages.reserve(row, self._end(row)):
            self._pages.release(row)
            return None
        self._slots.share_prompt(leader.row, row, length)
        self.cached += length
        job.leader = None
        return copies

    def _hold(self, job: Job) -> bool:
        """Whether the row has its pages, or gets them now: it leaves every other row one page to grow into."""
        if not self._empty(job):
            return True
        others = int((self._pages.held[: self._slots.count] > 0).sum())
        row, end = job.row, self._end(job.row)
        if self._pages.free < pages_of(end, self._pages.page) + others:
            return False
        if self._reuse:
            known = int(self._slots.known[row])
            found = self._pages.find(row, self._slots.tokens[row, : known - 1])
            self._slots.computed[row] = self._slots.head_computed[row] = found
            self.cached += found
        return self._pages.reserve(row, end)

    def _remember(self, job: Job) -> None:
        """What the row has computed can be found, if it was under the present weights alone."""
        if self._reuse and job not in self._mixed:
            row = job.row
            written = min(int(self._slots.computed[row]), int(self._slots.known[row]))
            self._pages.remember(row, self._slots.tokens[row, :written])

    def _end(self, row: int) -> int:
        return int(self._slots.known[row] + (self.source[row] != NONE))

    def _cut(self, fields: Fields, first: int, row: int, start: int, end: int) -> int:
        """Tiles from number `first` on; returns how many."""
        tile = self._tile
        tiles = -(-(end - start) // tile)
        place = slice(first, first + tiles)
        fields.tile_row_J[place] = row
        fields.tile_start_J[place] = starts_J = start + tile * np.arange(tiles)
        fields.tile_count_J[place] = np.minimum(end - starts_J, tile)
        tokens = np.zeros(1 + tiles * tile, np.int32)
        tokens[: 1 + end - start] = self._slots.tokens[row, start : end + 1]
        fields.tile_token_J_S[place] = tokens[:-1].reshape(tiles, tile)
        fields.tile_next_J_S[place] = tokens[1:].reshape(tiles, tile)
        return tiles

    def _reserve(self, row: int, length: int) -> None:
        """Give a row pages, at the cost of the youngest, which may be the row itself."""
        while not self._pages.reserve(row, length):
            holders = [job for job in self._slots.jobs if job.row == row or self._pages.held[job.row]]
            victim = max(holders, key=self._ages.__getitem__)
            self._evict(victim)
            if victim.row == row:
                return

    def _evict(self, job: Job) -> None:
        """Its tokens stay; keys and values are computed again."""
        slots, row, known = self._slots, job.row, self._end(job.row)
        if self._routes is not None and known > slots.segment[row]:  # those before a sampled token stay as they were
            self._routes.save(row, int(slots.routed[row]), min(known - 1, int(slots.computed[row])))
        self._remember(job)
        self._mixed.discard(job)  # all of it is computed again
        self._pages.release(row)
        slots.computed[row] = slots.head_computed[row] = 0
        if slots.drafts is not None:
            slots.drafts.count[row] = 0
        lagging = {job, *(other for other in self._lagging if other.row >= 0)}  # some may have ended meanwhile
        self._lagging = sorted(lagging, key=self._ages.__getitem__)
