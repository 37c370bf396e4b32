"""The rows of the running batch, as columns of arrays: rows 0 to count-1 are live, without holes.

`known` counts the tokens a row has (prompt and sampled), `computed` those whose keys and values are in the cache.
A row samples when a step brings `computed` up to `known`. Prefill, resumed answers and recomputing after a weight
update are all the same: a row whose `computed` lags.

`routes` are those of the computed tokens, where the model has experts and they are recorded; those of the first
`routed` are already where they belong.

Drafts, where there are any, wait in columns of their own. The cache of a drafting head is filled from `head_from` to
`head_computed`: it has gaps where nothing was drafted for a while.
"""

from typing import NamedTuple, Protocol

import numpy as np

from asyncrl.engines.cooperative import Job
from asyncrl.engines.native.sampling import (
    Column,
    Purpose,
    RowSettings,
    row_settings,
    stream_starts,
    uniforms_at,
)
from asyncrl.engines.native.verification import DraftTable, Verdict
from asyncrl.types import Sampling

NO_TOKEN = -1
_PLAIN = RowSettings()


class Ended(NamedTuple):
    """Rows that end with the token of this step, and which of them because it is a stop token."""

    rows: list[int]
    stopped: list[bool]


class RouteTable(Protocol):
    """Routes of the computed tokens of each row."""

    def place(self, row: int) -> None:
        """A new job is in the row."""
        ...

    def move(self, last: int, row: int, length: int) -> None: ...

    def share(self, source: int, target: int, length: int) -> None:
        """The first `length` positions of a row are those of another."""
        ...

    def read(self, row: int, begin: int, end: int) -> bytes: ...


class BatchTable:
    def __init__(
        self, rows: int, length: int, drafts: DraftTable | None = None, routes: RouteTable | None = None
    ) -> None:
        self.jobs: list[Job] = []
        self._max_length = length
        self.drafts = drafts
        spare = 2 + drafts.nodes if drafts is not None else 0  # a step may compute drafts behind the end of an answer
        # Zeroed pages cost no memory before they are touched, so the widest row is reserved at once.
        self.tokens = np.zeros((rows, length + spare), np.int64)
        self.logprobs = np.zeros((rows, length), np.float32)
        self.routes = routes
        self._integers = np.zeros((9, rows), np.int64)
        self.known, self.computed, self.segment, self.limit, self._top_k = self._integers[:5]
        self.head_from, self.head_computed, self._begin, self.routed = self._integers[5:]
        self._starts = np.zeros((len(Purpose), rows), np.uint64)
        """Of the streams of random numbers."""
        self._reals = np.zeros((2, rows), np.float32)
        self.temperature, self._top_p = self._reals
        self._plain = np.zeros(rows, np.bool_)
        """Rows that sample from the whole vocabulary at temperature 1, as most do."""
        self._stop = np.full((rows, 1), NO_TOKEN, np.int64)
        self._settings: RowSettings | None = None
        self.index = np.arange(rows)

    @property
    def count(self) -> int:
        return len(self.jobs)

    def append(self, job: Job) -> None:
        self.jobs.append(job)
        self.place(job, len(self.jobs) - 1)

    def place(self, job: Job, row: int) -> None:
        """Put a new job into a row."""
        request, sampling = job.request, job.request.sampling
        length = len(request.tokens)
        job.row = row
        self.jobs[row] = job
        self.tokens[row, :length] = request.tokens
        self.known[row], self.computed[row], self.segment[row] = length, 0, length
        self.routed[row] = request.routed
        if self.routes is not None:
            self.routes.place(row)
        begin = self._begin[row] = length - request.resumed
        self.limit[row] = min(begin + sampling.max_tokens, self._max_length)
        self._starts[Purpose.PLAIN, row] = request.seed % 2**64
        self._place_sampling(row, sampling)
        self._settings = None
        if self.drafts is not None:
            self.drafts.count[row] = 0
            self.head_from[row] = self.head_computed[row] = 0
            self._starts[:, row] = stream_starts(request.seed)

    def remove_last_into(self, row: int) -> None:
        """Drop a row by moving the last one into its place."""
        last = len(self.jobs) - 1
        job = self.jobs.pop()
        self._settings = None
        if row == last:
            return
        self.jobs[row], job.row = job, row
        length = self.known[last]
        self.tokens[row, :length] = self.tokens[last, :length]
        self.logprobs[row, :length] = self.logprobs[last, :length]
        if self.routes is not None:
            self.routes.move(last, row, int(length))
        self._integers[:, row] = self._integers[:, last]
        self._starts[:, row] = self._starts[:, last]
        self._reals[:, row] = self._reals[:, last]
        self._plain[row] = self._plain[last]
        self._stop[row] = self._stop[last]
        if self.drafts is not None:
            self.drafts.move(last, row)

    def share_prompt(self, source: int, target: int, length: int) -> None:
        """The first `length` positions of a row were copied from another."""
        self.computed[target] = length
        if self.routes is not None:
            self.routes.share(source, target, length)
        self.head_from[target] = min(self.head_from[source], length)
        self.head_computed[target] = length if self.head_computed[source] >= length else 0

    def take_segment(self, row: int) -> tuple[Column, Column, bytes]:
        """Tokens, log-probabilities and routes that were not taken before. With no new token there is no new route:
        what is computed again before one is sampled may still change."""
        begin, end = int(self.segment[row]), int(self.known[row])
        self.segment[row] = end
        routes = b""
        if self.routes is not None and end > begin:
            routes = self.routes.read(row, int(self.routed[row]), end - 1)
            self.routed[row] = end - 1
        return self.tokens[row, begin:end], self.logprobs[row, begin:end], routes

    def uniforms_of(self, purpose: Purpose, positions_N_W: Column) -> Column:
        """Random numbers for tokens of the live rows at any positions."""
        rows = slice(0, self.count)
        return uniforms_at(self._starts[purpose, rows, None], positions_N_W - self._begin[rows, None])

    def drawn(self) -> Column:
        """The live rows that are not greedy."""
        return self.temperature[: self.count] > 0

    def restricted(self) -> Column:
        """The live rows that sample from a part of the vocabulary."""
        rows = slice(0, self.count)
        return (self.temperature[rows] > 0) & ((self._top_k[rows] > 0) | (self._top_p[rows] < 1))

    def settings(self) -> RowSettings:
        """Sampling settings of the live rows; made again only when rows changed."""
        if self._settings is None:
            rows = slice(0, self.count)
            mixed = not self._plain[rows].all()
            self._settings = (
                row_settings(self.temperature[rows], self._top_k[rows], self._top_p[rows]) if mixed else _PLAIN
            )
        return self._settings

    def record(self, end_N: Column, token_N: Column, logprob_N: Column) -> tuple[int, Ended]:
        """Store one step: rows are computed up to `end_N`, and those that caught up keep their token."""
        rows_R = live = self.index[: self.count]
        self.computed[: self.count] = end_N
        caught_up_N = end_N == self.known[: self.count]
        if not caught_up_N.all():
            rows_R = live[caught_up_N]
            end_N, token_N, logprob_N = end_N[caught_up_N], token_N[caught_up_N], logprob_N[caught_up_N]
        return self.keep(rows_R, end_N, token_N, logprob_N)

    def keep(self, rows_R: Column, end_R: Column, token_R: Column, logprob_R: Column) -> tuple[int, Ended]:
        """Give some rows, which know `end_R` tokens, one more. Returns how many, and the rows that end with theirs."""
        self.tokens[rows_R, end_R] = token_R
        self.logprobs[rows_R, end_R] = logprob_R
        self.known[rows_R] = known_R = end_R + 1
        stops_R = (self._stop[rows_R] == token_R[:, None]).any(1)
        ends_R = (stops_R | (known_R == self.limit[rows_R])).nonzero()[0]
        return len(rows_R), Ended(rows_R[ends_R].tolist(), stops_R[ends_R].tolist())

    def record_runs(self, end_N: Column, verdict: Verdict) -> tuple[Column, Ended]:
        """The same for a step with drafts: rows that caught up keep the accepted ones and one token more.

        A stop token or the limit ends a run early. Returns how many tokens each row keeps.
        """
        rows, width = verdict.tokens_N_W.shape
        known_N, column_W = self.known[:rows], np.arange(width)
        run_N = np.where(end_N == known_N, np.minimum(verdict.accepted_N + 1, self.limit[:rows] - known_N), 0)
        stops_N_W = (self._stop[:rows, None] == verdict.tokens_N_W[:, :, None]).any(2) & (column_W < run_N[:, None])
        stopped_N = stops_N_W.any(1)
        run_N = np.where(stopped_N, stops_N_W.argmax(1) + 1, run_N)
        row_R, column_R = (column_W < run_N[:, None]).nonzero()
        place_R = row_R, known_N[row_R] + column_R
        self.tokens[place_R] = verdict.tokens_N_W[row_R, column_R]
        self.logprobs[place_R] = verdict.logprobs_N_W[row_R, column_R]
        known_N += run_N
        self.computed[:rows] = np.where(run_N > 0, known_N - 1, end_N)
        ends_R = (stopped_N | ((run_N > 0) & (known_N == self.limit[:rows]))).nonzero()[0]
        return run_N, Ended(ends_R.tolist(), stopped_N[ends_R].tolist())

    def _place_sampling(self, row: int, sampling: Sampling) -> None:
        temperature, top_k, top_p, stop = sampling.temperature, sampling.top_k, sampling.top_p, sampling.stop
        self.temperature[row], self._top_k[row], self._top_p[row] = temperature, top_k, top_p
        self._plain[row] = temperature == 1 and top_k == 0 and top_p == 1
        missing = len(stop) - self._stop.shape[1]
        if missing > 0:
            self._stop = np.pad(self._stop, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
        self._stop[row] = NO_TOKEN
        self._stop[row, : len(stop)] = stop
