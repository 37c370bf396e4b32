"""Random windows and heads for the tests of drafting."""

from typing import Any

import torch

from asyncrl.config.drafter import Eagle3Drafter, EagleDrafter
from asyncrl.drafting.checkpoint import fresh_head
from asyncrl.drafting.heads import Head
from asyncrl.drafting.windows import Window
from asyncrl.models.config import ModelConfig
from asyncrl.types import Slot
from tests.support.tiny_model import SHAPE

TARGET = ModelConfig.from_hf(SHAPE | {"model_type": "qwen3", "head_dim": 8, "initializer_range": 0.1})
DRAFTERS = {"eagle": EagleDrafter(), "eagle3": Eagle3Drafter()}
KINDS = tuple(DRAFTERS)


def random_head(kind: str, seed: int = 0) -> Head:
    return fresh_head(DRAFTERS[kind], TARGET, seed)


def random_window(kind: str, length: int, *, prompt: int = 1, seed: int = 0, **changes: Any) -> Window:
    """The first `prompt` tokens were given, all others sampled."""
    generator = torch.Generator().manual_seed(seed)
    hidden = TARGET.hidden_size
    values: dict[str, Any] = {
        "slot": Slot(seed, 0),
        "version": 0,
        "answer_length": length + 1 - prompt,
        "start": 0,
        "tokens_T": torch.randint(0, TARGET.vocabulary, (length,), generator=generator, dtype=torch.int32),
        "sampled_T": torch.arange(length) >= prompt - 1,
        "hidden_T_E": torch.randn(length, hidden, generator=generator),
        "taps_T_R": torch.randn(length, 2 * hidden, generator=generator) if kind == "eagle3" else None,
    }
    return Window(**values | changes)


def target_matrices(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Embedding and output matrix."""
    generator = torch.Generator().manual_seed(seed)
    shape = (TARGET.vocabulary, TARGET.hidden_size)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
