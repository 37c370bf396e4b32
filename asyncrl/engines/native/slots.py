"""The rows of the running batch, as columns of arrays: rows 0 to count-1 are live, without holes.

`known` counts the tokens a row has (prompt and sampled), `computed` those whose keys and values are in the cache.
A row samples when a step brings `computed` up to `known`. Prefill, resumed answers and recomputing after a weight
update are all the same: a row whose `computed` lags.
"""

import numpy as np

from asyncrl.engines.cooperative import Job
from asyncrl.engines.native.sampling import Column, RowSettings, row_settings, uniforms

NO_TOKEN = -1


class SlotTable:
    def __init__(self, rows: int, length: int) -> None:
        self.jobs: list[Job] = []
        self._max_length = length
        # Zeroed pages cost no memory before they are touched, so the widest row is reserved at once.
        self.tokens = np.zeros((rows, length), np.int64)
        self.logprobs = np.zeros((rows, length), np.float32)
        self.uniforms = np.zeros((rows, length), np.float32)
        self._integers = np.zeros((5, rows), np.int64)
        self.known, self.computed, self.segment, self._limit, self._top_k = self._integers
        self._reals = np.zeros((2, rows), np.float32)
        self._temperature, self._top_p = self._reals
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
        begin = length - request.resumed
        limit = self._limit[row] = min(begin + sampling.max_tokens, self._max_length)
        self.uniforms[row, begin:limit] = uniforms(request.seed, limit - begin)
        self._top_k[row], self._top_p[row], self._temperature[row] = (
            sampling.top_k,
            sampling.top_p,
            sampling.temperature,
        )
        self._place_stop(row, sampling.stop)
        self._settings = None

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
        limit = self._limit[last]
        self.uniforms[row, length:limit] = self.uniforms[last, length:limit]
        self._integers[:, row] = self._integers[:, last]
        self._reals[:, row] = self._reals[:, last]
        self._stop[row] = self._stop[last]

    def settings(self) -> RowSettings:
        """Sampling settings of the live rows; made again only when rows changed."""
        if self._settings is None:
            rows = slice(0, self.count)
            self._settings = row_settings(self._temperature[rows], self._top_k[rows], self._top_p[rows])
        return self._settings

    def record(self, end_N: Column, token_N: Column, logprob_N: Column) -> tuple[int, Column]:
        """Store one step: rows are computed up to `end_N`, and those that caught up keep their token.

        Returns how many tokens were kept and the rows that end with theirs.
        """
        live = slice(0, self.count)
        self.computed[live] = end_N
        caught_up_N = end_N == self.known[live]
        ready_R = self.index[live] if caught_up_N.all() else caught_up_N.nonzero()[0]
        token_R, at_R = token_N[ready_R], end_N[ready_R]
        self.tokens[ready_R, at_R] = token_R
        self.logprobs[ready_R, at_R] = logprob_N[ready_R]
        self.known[ready_R] = known_R = at_R + 1
        ends_R = (self._stop[ready_R] == token_R[:, None]).any(1) | (known_R == self._limit[ready_R])
        return len(ready_R), ready_R[ends_R]

    def stopped(self, row: int) -> bool:
        """Whether the last token of a row is one of its stop tokens."""
        return bool((self._stop[row] == self.tokens[row, self.known[row] - 1]).any())

    def _place_stop(self, row: int, stop: tuple[int, ...]) -> None:
        missing = len(stop) - self._stop.shape[1]
        if missing > 0:
            self._stop = np.pad(self._stop, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
        self._stop[row] = NO_TOKEN
        self._stop[row, : len(stop)] = stop
