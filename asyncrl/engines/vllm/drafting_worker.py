"""vLLM's GPU worker, drafting as many tokens as the scheduler asks for; named by the engine argument `worker_cls`.

vLLM's model runner V2 always drafts its full number of tokens. One is drafted in any case, which keeps the head's keys
and values complete. Version 0.29 replays several tokens as one CUDA graph: there only the step to one is cheaper.
True for 0.26 to 0.29; delete the file when `propose` of the runner's speculator takes the number of tokens.
"""

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu_worker import Worker


class DraftingWorker(Worker):
    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        speculator: Any = getattr(self.model_runner, "speculator", None)  # runner V1 has none, and drafts as it should
        if speculator is not None:
            speculator.num_speculative_steps = max(1, scheduler_output.num_spec_tokens_to_schedule)
        return super().execute_model(scheduler_output)
