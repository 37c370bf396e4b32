"""A reward model: a language model with a head of one number, such as `AutoModelForSequenceClassification` loads.

    reward.function=asyncrl.rewards.model:reward reward.model=DIRECTORY

Needs the extra `transformers`. Each worker loads a model of its own, when it imports this.
"""

import os
from functools import cache
from typing import Any, NamedTuple

import torch

from asyncrl.errors import ConfigError
from asyncrl.system.optional import require
from asyncrl.user_code.protocol import REWARD_MODEL


class Loaded(NamedTuple):
    model: Any
    tokenizer: Any
    longest: int
    device: torch.device


@cache
def load() -> Loaded:
    """ConfigError where the directory holds no such model."""
    device, _, path = os.environ.get(REWARD_MODEL, "").partition("|")
    library = require("transformers", extra="transformers")
    try:
        model = library.AutoModelForSequenceClassification.from_pretrained(path, use_safetensors=True)
        tokenizer = library.AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"reward.model={path} cannot be loaded as a reward model: {why:.300}") from None
    if (labels := int(model.config.num_labels)) != 1:
        raise ConfigError(f"reward.model={path} is no reward model: its head gives {labels} numbers, not one")
    longest = getattr(model.config, "max_position_embeddings", None) or 1 << 30
    return Loaded(model.eval().to(device), tokenizer, longest, torch.device(device))


def reward(prompt: str, completion: str, answer: str, turns: list[str] | None = None) -> float:
    """The model's number for the conversation; of one that is too long for it, for the end."""
    loaded = load()
    tokens = _tokens(loaded.tokenizer, prompt, turns or [completion])[-loaded.longest :]
    with torch.inference_mode():
        (score,) = loaded.model(input_ids=torch.tensor([tokens], device=loaded.device)).logits.flatten().tolist()
    return float(score)


def _tokens(tokenizer: Any, prompt: str, turns: list[str]) -> list[int]:
    """In the model's chat template, if it has one; else prompt and turns as one text."""
    if not tokenizer.chat_template:
        return tokenizer("".join([prompt, *turns]))["input_ids"]
    said = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate([prompt, *turns])]
    return tokenizer.apply_chat_template(said, return_dict=False)


if REWARD_MODEL in os.environ:
    load()  # now: it takes longer than a reward may
