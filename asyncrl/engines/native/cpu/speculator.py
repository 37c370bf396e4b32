"""A step with drafts: verify those of the last step, then draft for the next one.

plan -> target over all columns -> verify -> record -> source drafts -> the next plan

The strategy of the next step is chosen before the target runs, because drafting decides what is kept of it. The time
of a strategy is that of its drafting, at the end of one step, and of the step that verifies.
"""

from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from asyncrl.config.drafter import PLAIN
from asyncrl.engines.native.cpu.decoding import Decoding, Outcome, States
from asyncrl.engines.native.cpu.scheduler import Scheduler, Step
from asyncrl.engines.native.sampling import Purpose
from asyncrl.engines.native.speculation.source import Chooser, Seen, Source, Tally
from asyncrl.engines.native.verification import Drafted, DraftTable, Uniforms, Verdict, verify


class Speculator:
    def __init__(
        self,
        decoding: Decoding,
        scheduler: Scheduler,
        drafts: DraftTable,
        source: Source,
        chooser: Chooser,
        tally: Tally,
    ) -> None:
        self._decoding, self._scheduler, self._source, self._chooser = decoding, scheduler, source, chooser
        self._drafts, self._tally = drafts, tally
        self._strategy = PLAIN
        self._drafting_seconds = 0.0

    def step(self) -> Outcome:
        began = perf_counter()
        strategy, before = self._strategy, self._drafting_seconds
        step, batch = self._scheduler.plan(), self._decoding.slots.count
        self._strategy = self._chooser.choose(batch)
        self._drafting_seconds = 0.0
        if step.layout.width == 1 and self._strategy.depth == 0:
            outcome = self._decoding.plain(step)
        else:
            outcome = self._speculate(step)
        if not step.layout.chunks:
            seconds = perf_counter() - began - self._drafting_seconds + before
            self._chooser.record(batch, strategy, outcome.sampled, seconds)
        return outcome

    def _speculate(self, step: Step) -> Outcome:
        slots, layout = self._decoding.slots, step.layout
        rows, width = layout.rows, layout.width
        states = self._decoding.target(step, self._source.taps if self._strategy.depth else None)
        drafted = self._drafts.drafted(step.tokens_T[: rows * width].reshape(rows, width))
        logits_X_V = self._decoding.policy.logits(states.hidden_T_E[: rows * width])
        verdict = verify(logits_X_V, slots.settings(), drafted, self._uniforms(step, drafted))
        start_N = slots.computed[:rows].copy()
        kept_N, ended = slots.record_runs(step.end_N, verdict)
        self._tally.add(drafted.valid_N_W.sum(1), np.minimum(verdict.accepted_N, kept_N))
        if layout.branches is not None:
            self._straighten(step, verdict)
        self._decoding.give(step, states, verdict.path_N_W)
        if self._strategy.depth:
            began = perf_counter()
            read_T_R = self._read(states, verdict, layout.branches is not None)
            chain = layout._replace(branches=None, all_chunks=True)
            last_N = slots.computed[:rows] - step.end_N
            self._source.draft(slots, self._strategy, Seen(chain, start_N, last_N, kept_N > 0, read_T_R))
            self._drafting_seconds = perf_counter() - began
        else:
            self._drafts.clear()
        prefilled = len(step.tokens_T) - rows * width + int((kept_N == 0).sum())
        return Outcome(int(kept_N.sum()), prefilled, ended, float(verdict.logprobs_N_W[:, 0].sum()))

    def _uniforms(self, step: Step, drafted: Drafted) -> Uniforms:
        rows, width = drafted.tokens_N_W.shape
        slots, next_N_W = self._decoding.slots, step.positions_T[: rows * width].reshape(rows, width) + 1
        plain_N_W = slots.uniforms_of(Purpose.PLAIN, next_N_W)
        if drafted.q_N_C_V is None:
            return Uniforms(plain_N_W)
        accept_N_W = slots.uniforms_of(Purpose.ACCEPT, next_N_W)
        return Uniforms(plain_N_W, accept_N_W, slots.uniforms_of(Purpose.RESIDUAL, next_N_W))

    def _straighten(self, step: Step, verdict: Verdict) -> None:
        """Move the keys and values of an accepted path to where a chain would have put them."""
        column_W = np.arange(step.layout.width)
        moved_N_W = (verdict.path_N_W != column_W) & (column_W <= verdict.accepted_N[:, None])
        row_R, column_R = moved_N_W.nonzero()
        base_R = step.end_N[row_R] - 1
        self._decoding.cache.gather(row_R, base_R + verdict.path_N_W[row_R, column_R], base_R + column_R)

    def _read(self, states: States, verdict: Verdict, is_tree: bool) -> Tensor | None:
        """What the source reads, with the accepted path of each row first."""
        if self._source.taps is None:
            return None
        final = not self._source.taps
        read_T_R = self._decoding.policy.final(states.hidden_T_E) if final else torch.cat(states.taps, -1)
        if not is_tree:
            return read_T_R
        rows, width = verdict.path_N_W.shape
        order_X = (np.arange(rows)[:, None] * width + verdict.path_N_W).ravel()
        return torch.cat([read_T_R[torch.from_numpy(order_X)], read_T_R[rows * width :]])
