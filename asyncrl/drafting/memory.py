"""What a drafter that learns takes of a device's memory, by arithmetic alone: torch is not imported.

head        in fp32: weights, gradients, Adam's moments, and the copy that was published last
policy      its embedding and its output matrix, in fp32
logits      of each drafting step that the head is unrolled, and of the policy, with their softmax
"""

from typing import NamedTuple

from asyncrl.config.drafter import HeadDrafter
from asyncrl.models.config import ModelConfig

FLOAT = 4
HEADS = 5
"""In the size of one: weights, gradients, two moments, and the published copy."""
PART_TOKENS = 256
"""Trained on between two looks at whether the machine is needed: some tens of milliseconds on a CPU."""


class DrafterMemory(NamedTuple):
    """Bytes."""

    computed: int = 0
    """Where it computes."""
    hidden_states: int = 0
    """In the host's memory."""
    published: int = 0
    """One head on its way to the engines."""


def drafter_memory(drafter: HeadDrafter, model: ModelConfig) -> DrafterMemory:
    training, head = drafter.training, head_parameters(drafter, model)
    matrices = (1 if model.tied_embeddings else 2) * model.vocabulary * model.hidden_size
    tokens = PART_TOKENS + training.window_tokens  # the last window of a part may be a whole one
    logits = 2 * (training.unroll + 1) * tokens * (drafter.vocabulary or model.vocabulary)
    return DrafterMemory(FLOAT * (HEADS * head + matrices + logits), training.max_bytes, FLOAT * head)


def head_parameters(drafter: HeadDrafter, model: ModelConfig) -> int:
    """Of `asyncrl.drafting.heads.Head`."""
    hidden, heads = model.hidden_size, model.heads * model.head_dim
    inputs = heads + 2 * model.kv_heads * model.head_dim
    layer = hidden * (heads + 3 * model.intermediate_size + 1)
    if drafter.uses_target_output:
        return layer + hidden * (2 * hidden + inputs)
    taps = 3 if model.layers >= 8 else len({0, model.layers // 2, model.layers - 1})
    vocabulary = drafter.vocabulary or model.vocabulary
    return layer + hidden * (taps * hidden + 2 * inputs + vocabulary + 3)
