"""A small model made on the spot: fresh weights, then a short supervised start on noisy worked examples.

The examples are wrong on purpose at some steps. A model that imitates them knows how to write an answer and is right
often enough to be rewarded, and leaves the rest to RL.
"""

import math
from collections.abc import Callable
from itertools import count
from pathlib import Path
from random import Random

import msgspec
import torch
from torch.nn import functional as F

from asyncrl.config import WarmStart
from asyncrl.config.task import ChainsTask, TaskSettings
from asyncrl.data.tokenizer import Tokenizer, save_character_tokenizer
from asyncrl.errors import ConfigError
from asyncrl.models.checkpoint import random_model, save_model
from asyncrl.models.config import ARCHITECTURES, ModelConfig, warm_start_shape
from asyncrl.models.decoder import Decoder
from asyncrl.models.packed import packed_attention
from asyncrl.system.storage import storing
from asyncrl.tasks.chains import CHARACTERS, END, MIN_SIZE, Chain, Chains

MAX_POSITIONS = 256
RAMP = 20
"""Steps over which the learning rate rises; it falls to zero over the rest."""
GROWTH = 0.5
"""Share of the steps over which problems grow from the smallest to their full sizes."""
WIDER = 1.5
"""How much wider than the task's own the sizes are spread: long problems are rare, and every label must be met."""
THREADS = 1
"""Fixed, because the order of sums, and with it the last bits of the weights, depends on it."""

Progress = Callable[[int, float], None]
"""Called with the number of steps done and their last loss."""
Example = tuple[list[int], int]
"""Tokens, and how many of them are the prompt."""


def make_model(
    settings: WarmStart, task: TaskSettings, seed: int, directory: str | Path, progress: Progress | None = None
) -> Path:
    """Write a Hugging Face checkpoint with its tokenizer into `directory`. Same seed, same bytes on one machine."""
    chains = task.worked_examples
    if chains is None:
        raise ConfigError(
            f"model.type=warm_start knows how to write examples for task.type=chains only, not for {task.kind}; set "
            "model.type=checkpoint and model.path"
        )
    directory = Path(directory)
    with storing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        tokenizer = save_character_tokenizer(directory, CHARACTERS, END, MAX_POSITIONS)
    model = random_model(_config(settings, tokenizer), seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        _train(model, settings, Examples(chains, tokenizer, settings.noise, seed), progress)
    finally:
        torch.set_num_threads(threads)
    with storing(directory):
        save_model(model, directory)
    return directory


class Examples:
    """Endless training problems with answers that contain mistakes."""

    def __init__(self, task: ChainsTask, tokenizer: Tokenizer, noise: float, seed: int) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._noise = noise
        # Another stream than RL's: the start should not have seen what RL is asked.
        self._seed = seed ^ 0x5EED
        self._random = Random(f"{seed}/warm_start")
        self._indices = count()

    def batch(self, num_tokens: int, growth: float) -> list[Example]:
        """At least `num_tokens` of examples; `growth` goes from 0, the smallest problems, to 1."""
        chains = Chains(_easier(self._task, growth), self._seed)
        found: list[Example] = []
        while sum(len(tokens) for tokens, _ in found) < num_tokens:
            found.append(self._example(chains.chain("train", next(self._indices))))
        return found

    def _example(self, chain: Chain) -> Example:
        prompt = self._tokenizer.encode(chain.prompt)
        answer = self._tokenizer.encode(chain.worked(noisy_values(chain, self._noise, self._random)))
        return prompt + answer, len(prompt)


def _easier(task: ChainsTask, growth: float) -> ChainsTask:
    """Copying and adding are learned on short problems first; in long ones from the start they take twice as long."""
    median = round(MIN_SIZE + (task.median_size * WIDER - MIN_SIZE) * growth)
    return msgspec.structs.replace(task, median_size=median, size_spread=task.size_spread * WIDER * growth)


def noisy_values(chain: Chain, noise: float, random: Random) -> tuple[int, ...]:
    """Running values of which some are wrong; the chain goes on from what was written, modulo ten.

    Every step then still is an example of its own addition, and a mistake costs the whole answer its reward.
    """
    written = [chain.values[0]]
    for before, after in zip(chain.values, chain.values[1:], strict=False):
        slip = random.randrange(1, 10) if random.random() < noise else 0
        written.append((written[-1] + after - before + slip) % 10)
    return tuple(written)


def _config(settings: WarmStart, tokenizer: Tokenizer) -> ModelConfig:
    (eos,) = tokenizer.eos_ids
    shape = warm_start_shape(settings, tokenizer.size)
    return ModelConfig.from_hf(
        {
            **shape,
            "architectures": [ARCHITECTURES[shape["model_type"]] + "ForCausalLM"],
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000.0,
            "max_position_embeddings": MAX_POSITIONS,
            "initializer_range": 0.08,
            "eos_token_id": eos,
            "pad_token_id": 0,
        }
    )


def _train(model: Decoder, settings: WarmStart, examples: Examples, progress: Progress | None) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, settings.steps))
    for step in range(1, settings.steps + 1):
        growth = min(1.0, step / (GROWTH * settings.steps))
        loss = _loss(model, examples.batch(settings.batch_tokens, growth))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if progress is not None:
            progress(step, loss.item())


def _rate(step: int, steps: int) -> float:
    """A short ramp, then half a cosine."""
    return min(1.0, (step + 1) / RAMP) * 0.5 * (1.0 + math.cos(math.pi * step / steps))


def _loss(model: Decoder, batch: list[Example]) -> torch.Tensor:
    """Mean cross-entropy of the answers' tokens. Axis suffixes: T all tokens, L those of answers, E hidden size."""
    lengths = [len(tokens) for tokens, _ in batch]
    tokens_T = torch.tensor([token for tokens, _ in batch for token in tokens])
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    prompt_T = torch.repeat_interleave(torch.tensor([prompt for _, prompt in batch]), torch.tensor(lengths))
    answer_L = torch.nonzero(positions_T >= prompt_T).squeeze(1)
    hidden_T_E = model(tokens_T, positions_T, packed_attention(lengths))
    return F.cross_entropy(model.logits(hidden_T_E[answer_L - 1]), tokens_T[answer_L])
