"""Inside vLLM's engine process: log-probabilities of a step leave together, and a bandit may say how much is drafted.

vLLM takes a scheduler of ours by its argument `scheduler_cls`.

- Its own one makes three small arrays for the log-probabilities of each request, and each is encoded by itself. For 256
  requests that is a third of the 11 ms that the engine process takes for a step on the host (H200, vLLM 0.26), more
  than the GPU needs for 8B in FP8. Ours makes three arrays for all of them.
- Its own one reads the number of tokens to draft from `dynamic_sd_lookup`, by the number of requests in the step; ours
  replaces that table before each step, as the bandit says, and measures what they gave. Figures reach our engine, and
  orders come back, through `asyncrl.drafting.bandit`.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import msgspec
from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

from asyncrl.drafting.bandit import Bandit, Report, Speculation
from asyncrl.engines.vllm.environment import SPECULATION

EXCHANGE_S = 0.5
"""Between two looks at the files."""
log = logging.getLogger(__name__)


class Meter:
    """The bandit's eyes and hands in a scheduler."""

    def __init__(self, speculation: Speculation) -> None:
        self._speculation = speculation
        self._bandit = Bandit(speculation.drafter, 0, speculation.report().learned)
        self._by_depth = {strategy.depth: strategy for strategy in speculation.drafter.strategies}
        self._ordered: int | None = None
        self._ended: float | None = None
        self._exchanged = 0.0

    def depth(self, batch: int) -> int:
        return self._bandit.choose(batch).depth if self._ordered is None else self._ordered

    def ended(self, scheduled: SchedulerOutput, outputs: dict[int, EngineCoreOutputs], idle: bool) -> None:
        """A step took what passed since the end of the one before: with asynchronous scheduling they overlap."""
        now = perf_counter()
        seconds = 0.0 if self._ended is None else now - self._ended
        self._ended = None if idle else now
        batch = len(scheduled.num_scheduled_tokens)
        decoding = batch + sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))
        strategy = self._by_depth.get(scheduled.num_spec_tokens_to_schedule)
        # A step that rather computes prompts says nothing; a few prompts are in nearly every step of short answers.
        if batch and strategy and scheduled.total_num_scheduled_tokens <= 2 * decoding:
            tokens = sum(len(output.new_token_ids) for each in outputs.values() for output in each.outputs)
            self._bandit.record(batch, strategy, tokens, seconds)
        if now - self._exchanged > EXCHANGE_S:
            self._exchange(now)

    def _exchange(self, now: float) -> None:
        self._exchanged = now
        self._ordered = self._speculation.ordered()
        self._speculation.write("report", Report(self._bandit.report(), self._ordered, self._bandit.state()))


class JoiningScheduler(Scheduler):
    """The first output of a step that has tokens carries the log-probabilities of all of them."""

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        logprobs, model_runner_output.logprobs = model_runner_output.logprobs, None
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if logprobs is not None:
            for each in outputs.values():
                join(logprobs, model_runner_output.req_id_to_index, each.outputs)
        return outputs


class JoiningAsyncScheduler(JoiningScheduler, AsyncScheduler):
    """The same, scheduling the next step before the last one has ended."""


def join(logprobs: LogprobsLists, index: Mapping[str, int], outputs: Sequence[EngineCoreOutput]) -> None:
    """Rows of all sampled tokens, in the order of `outputs`; `index` has the place of each request in the batch."""
    sampled, starts = [output for output in outputs if output.new_token_ids], logprobs.cu_num_generated_tokens
    rows: list[int] = []
    for output in sampled:
        place = index[output.request_id]
        first = place if starts is None else starts[place]
        rows += range(first, first + len(output.new_token_ids))
    if rows:
        ids, values, ranks = (part[rows] for part in logprobs[:3])
        sampled[0].new_logprobs = LogprobsLists(ids, values, ranks)


class AdaptiveScheduler(JoiningScheduler):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._meter: Meter | None = None
        if self.dynamic_sd_lookup is None:
            log.warning(
                "drafter.adaptive.on=true is not possible here, as vLLM has switched off its dynamic speculation: "
                "always %d tokens are drafted",
                self.num_spec_tokens,
            )
        else:
            self._meter = Meter(msgspec.json.decode(os.environ[SPECULATION], type=Speculation))

    def schedule(self, *args: Any, **settings: Any) -> SchedulerOutput:
        if self._meter is not None:
            most = self.scheduler_config.max_num_seqs
            batch = min(len(self.running) + len(self.waiting), most)
            self.dynamic_sd_lookup = [min(self._meter.depth(batch), self.num_spec_tokens)] * (most + 1)
        return super().schedule(*args, **settings)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._meter is not None:
            self._meter.ended(scheduler_output, outputs, idle=not self.has_unfinished_requests())
        return outputs


class AdaptiveAsyncScheduler(AdaptiveScheduler, AsyncScheduler):
    """The same, scheduling the next step before the last one has ended."""


def joining_scheduler(vllm_config: VllmConfig, **settings: Any) -> Scheduler:
    """What vLLM calls for its scheduler, once it knows whether it schedules asynchronously."""
    chosen = JoiningAsyncScheduler if vllm_config.scheduler_config.async_scheduling else JoiningScheduler
    return chosen(vllm_config=vllm_config, **settings)


def adaptive_scheduler(vllm_config: VllmConfig, **settings: Any) -> Scheduler:
    """The same with the bandit."""
    chosen = AdaptiveAsyncScheduler if vllm_config.scheduler_config.async_scheduling else AdaptiveScheduler
    return chosen(vllm_config=vllm_config, **settings)
