"""vLLM's GPU worker, changed in two ways; named by the engine argument `worker_cls`."""

from tempfile import TemporaryDirectory
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu_worker import Worker


class GpuWorker(Worker):
    """Alone, it listens nowhere; below 0.29 vLLM waits for ranks on all addresses. Delete when 0.29 is the oldest."""

    def init_device(self) -> None:
        if self.parallel_config.world_size == 1:
            self._folder = TemporaryDirectory()
            self.distributed_init_method = f"file://{self._folder.name}/ranks"
        super().init_device()


class DraftingWorker(GpuWorker):
    """Drafts as many tokens as the scheduler asks for, but one at least, which keeps the head's keys complete.

    vLLM's model runner V2 always drafts its full number; 0.29 replays several as one CUDA graph, so only the step to 1
    is cheaper. True for 0.26 to 0.29; delete when `propose` of the speculator takes the number of tokens.
    """

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        speculator: Any = getattr(self.model_runner, "speculator", None)  # runner V1 has none, and drafts as it should
        if speculator is not None:
            speculator.num_speculative_steps = max(1, scheduler_output.num_spec_tokens_to_schedule)
        return super().execute_model(scheduler_output)
