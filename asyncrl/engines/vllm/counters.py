"""What vLLM reports about its steps."""

from vllm.v1.engine import EngineCoreEventType, EngineCoreOutputs


class Counters:
    """Sums since the start of the engine."""

    def __init__(self) -> None:
        self.steps = self.prefilled = self.preempted = self.drafts = self.drafted = 0
        self.accepted: list[int] = []
        """Accepted tokens by their position in the draft."""

    def count(self, step: EngineCoreOutputs) -> None:
        self.steps += bool(step.outputs)
        for output in step.outputs:
            if output.prefill_stats is not None:  # with a request's first token
                self.prefilled += output.prefill_stats.num_prompt_tokens
            if output.events:
                self.preempted += sum(event.type == EngineCoreEventType.PREEMPTED for event in output.events)
        drafting = step.scheduler_stats.spec_decoding_stats if step.scheduler_stats is not None else None
        if drafting is not None:
            self.drafts += drafting.num_drafts
            self.drafted += drafting.num_draft_tokens
            missing = len(drafting.num_accepted_tokens_per_pos) - len(self.accepted)
            self.accepted += [0] * missing
            for position, accepted in enumerate(drafting.num_accepted_tokens_per_pos):
                self.accepted[position] += accepted
