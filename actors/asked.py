"""The prompts of groups on their way to an engine: encoded in a thread, while running answers get their tokens."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from asyncrl.config import Rollout
from asyncrl.data.tokenizer import Tokenizer
from asyncrl.types import Prompt, Segment, Ticket

AT_ONCE = 4
"""Groups that are begun between two steps of an engine."""


class Asked(NamedTuple):
    """What the samples of a group have in common."""

    ticket: Ticket
    prompt: Prompt
    tokens: tuple[int, ...]
    segment: Segment
    """The same tokens, as trajectories begin with them."""


def batches(work: Sequence[tuple[Ticket, Prompt]]) -> Iterator[Sequence[tuple[Ticket, Prompt]]]:
    return (work[first : first + AT_ONCE] for first in range(0, len(work), AT_ONCE))


async def encode(work: Sequence[tuple[Ticket, Prompt]], tokenizer: Tokenizer, rollout: Rollout) -> list[Asked]:
    tokens = await asyncio.to_thread(tokenizer.encode_prompts, [prompt for _, prompt in work], rollout)
    return [Asked(*each, tuple(ids), Segment.given(ids)) for each, ids in zip(work, tokens, strict=True)]
