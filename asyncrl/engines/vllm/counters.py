"""What vLLM reports about its steps."""

from collections.abc import Callable

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats


class Counters:
    """Sums since the start of the engine."""

    def __init__(self, after_step: Callable[[], None]) -> None:
        """`after_step` is called when the tokens of a step have arrived."""
        self.after_step = after_step
        self.steps = self.prefilled = self.preempted = self.drafts = self.drafted = 0
        self.accepted: list[int] = []
        """Accepted tokens by their position in the draft."""

    def logger(self, vllm_config: VllmConfig, engine_index: int = 0) -> StatLoggerBase:
        """The factory that AsyncLLM asks for."""
        return _Logger(self)


class _Logger(StatLoggerBase):
    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        counters = self._counters
        if iteration_stats is not None:
            counters.steps += 1
            counters.prefilled += iteration_stats.num_prompt_tokens
            counters.preempted += iteration_stats.num_preempted_reqs
        drafting = scheduler_stats.spec_decoding_stats if scheduler_stats is not None else None
        if drafting is not None:
            counters.drafts += drafting.num_drafts
            counters.drafted += drafting.num_draft_tokens
            missing = len(drafting.num_accepted_tokens_per_pos) - len(counters.accepted)
            counters.accepted += [0] * missing
            for position, accepted in enumerate(drafting.num_accepted_tokens_per_pos):
                counters.accepted[position] += accepted
        counters.after_step()

    def log_engine_initialized(self) -> None: ...
