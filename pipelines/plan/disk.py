"""What the checkpoints of a run take on its disk, by arithmetic alone: what `asyncrl.training.checkpoint` writes."""

from asyncrl.config import Run
from asyncrl.models.config import ModelConfig
from asyncrl.training.memory import ADAM, FLOAT, adapter_parameters, critic_parameters, moment_bytes, parameters


def checkpoint_bytes(run: Run, model: ModelConfig) -> int:
    """One complete checkpoint, however many ranks write it; its JSON files and tokenizer are not counted.

    With LoRA the weights are the merged ones, in fp32; the adapters lie beside them, and only these have an optimizer
    state. A critic is always trained whole, in fp32.
    """
    count, adapters = parameters(model), adapter_parameters(run.trainer.lora, model)
    policy = FLOAT * (count + adapters) + int((adapters or count) * moment_bytes(run))
    if run.algorithm.critic_rate is None:
        return policy
    return policy + (FLOAT + ADAM) * critic_parameters(model)


def most_checkpoints(run: Run) -> int:
    """On disk at one time: a new one is complete before the oldest is deleted. 0 where none is ever written."""
    every, last, keep = run.checkpoint.every, run.checkpoint.last, run.checkpoint.keep
    written = run.steps // every if every else 0
    if last and (not every or run.steps % every):
        written += 1
    return min(written, keep + 1)
