"""Completions of one engine, from the tokenized prompt to the last token; with an environment, whole conversations.

    prompt | turn | given | turn | given | turn      one trajectory: given tokens are read, only turns are learned

Each turn is a request of its own with a random stream of its own, and the conversation so far is its prompt, so it may
have other policy versions than the turns before it. The state of a completion is its segments: from them any engine can
continue, in the middle of a turn or between two. Prompts are tokenized in a thread, while running requests get tokens.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from actors.reward import RewardActor
from asyncrl.config import Rollout, Run
from asyncrl.data.tokenizer import Tokenizer
from asyncrl.drop_reasons import DropReason
from asyncrl.engines.base import Engine
from asyncrl.system.random_streams import random_stream
from asyncrl.types import GIVEN, Finish, Prompt, Request, Segment, Slot, Ticket
from asyncrl.user_code.environments import Conversation
from asyncrl.user_code.protocol import RewardFailure, RewardInput

AT_ONCE = 4
"""Groups that are begun between two steps of an engine."""


class TokenizedPrompt(NamedTuple):
    """A group's prompt, which all its samples share."""

    ticket: Ticket
    prompt: Prompt
    tokens: tuple[int, ...]
    segment: Segment
    """The same tokens, as trajectories begin with them."""


def batches(work: Sequence[tuple[Ticket, Prompt]]) -> Iterator[Sequence[tuple[Ticket, Prompt]]]:
    return (work[first : first + AT_ONCE] for first in range(0, len(work), AT_ONCE))


async def tokenize(
    work: Sequence[tuple[Ticket, Prompt]], tokenizer: Tokenizer, rollout: Rollout
) -> list[TokenizedPrompt]:
    """In a thread: running completions get their next tokens meanwhile."""
    tokens = await asyncio.to_thread(tokenizer.encode_prompts, [prompt for _, prompt in work], rollout)
    return [TokenizedPrompt(*each, tuple(ids), Segment.given(ids)) for each, ids in zip(work, tokens, strict=True)]


class Completion(msgspec.Struct, frozen=True):
    """What an engine generated for one request, or for all requests of a conversation."""

    segments: tuple[Segment, ...]
    finish: Finish
    started: float
    finished: float
    failure: RewardFailure | None = None
    """Of the environment."""

    @property
    def sampled_tokens(self) -> int:
        return sum(len(segment) for segment in self.segments if segment.version != GIVEN)


class CompletionGenerator:
    def __init__(self, run: Run, engine: Engine, tokenizer: Tokenizer, reward: RewardActor) -> None:
        self._environment, self._rollout = run.environment, run.rollout
        self._engine, self._tokenizer, self._reward = engine, tokenizer, reward
        self._aborts: set[asyncio.Task[None]] = set()
        self.begun: dict[Slot, tuple[Segment, ...]] = {}
        """Segments of running samples, up to the last weight update or turn."""
        self.leaving = False

    async def converse(
        self,
        opening: Request,
        prompt: Prompt,
        deadline: float,
        begun: tuple[Segment, ...] = (),
        slot: Slot | None = None,
        waits: Callable[[bool], None] = lambda waits: None,
    ) -> Completion:
        """Turn after turn from where `begun` ends. `opening` asks for the first; `waits` for the environment or not."""
        started = time.time()
        keep = None if slot is None else partial(self.begun.__setitem__, slot)
        answer = Completion(begun, "stop", started, started)
        if not self._between_turns(begun):
            answer = await self.answer(_turn(opening, begun), deadline, begun, keep)
        while answer.finish == "stop" and self._environment.on:
            waits(True)
            answer = await self._respond(prompt, answer)
            waits(False)
            if answer.failure is not None or answer.segments[-1].version != GIVEN:
                break
            if slot is not None:  # held-out answers are finished here
                self.begun[slot] = answer.segments
                if self.leaving:
                    answer = msgspec.structs.replace(answer, finish="abort")
                    break
            answer = await self.answer(_turn(opening, answer.segments), deadline, answer.segments, keep)
        return msgspec.structs.replace(answer, started=started, finished=time.time())

    async def answer(
        self,
        request: Request,
        deadline: float,
        begun: tuple[Segment, ...] = (),
        keep: Callable[[tuple[Segment, ...]], None] | None = None,
    ) -> Completion:
        """Run one request to its end; past the deadline it is aborted, and what came so far is returned. `keep` gets
        what there is after each segment."""
        segments = list(begun)
        finish: Finish = "abort"
        started = time.time()
        alarm = asyncio.get_running_loop().call_later(max(0.0, deadline - started), self._abort, request.id)
        try:
            async for delta in self._engine.submit(request):
                if len(delta.segment):
                    segments.append(delta.segment)
                    if keep is not None:
                        keep(tuple(segments))
                finish = delta.finish or finish
        finally:
            alarm.cancel()
        return Completion(tuple(segments), finish, started, time.time())

    def reward_input(self, prompt: Prompt, answer: Completion) -> RewardInput:
        turns = self._turns(answer.segments)
        shown = turns if self._environment.on else ()
        return RewardInput(prompt.text, turns[-1] if turns else "", prompt.answer, shown)

    async def _respond(self, prompt: Prompt, answer: Completion) -> Completion:
        """With what the environment gives the model next; as it is when the conversation is over."""
        turns = self._turns(answer.segments)
        if len(turns) >= 2 * self._environment.max_turns - 1:
            return answer
        said = await self._reward.respond(Conversation(prompt.text, turns, prompt.answer))
        if said is None:
            return answer
        if not isinstance(said, RewardFailure):
            given = self._tokenizer.encode_turn(said, self._rollout, after=int(answer.segments[-1].tokens[-1]))
            if isinstance(given, list):
                return self._given(answer, given)
            said = RewardFailure(DropReason.ENVIRONMENT_INVALID, given)
        return msgspec.structs.replace(answer, failure=said)

    def _given(self, answer: Completion, tokens: list[int]) -> Completion:
        if sum(map(len, answer.segments)) + len(tokens) >= self._rollout.max_tokens:
            return msgspec.structs.replace(answer, finish="length")
        return msgspec.structs.replace(answer, segments=(*answer.segments, Segment.given(tokens)))

    def _between_turns(self, segments: tuple[Segment, ...]) -> bool:
        """Whether the model has ended its turn, so that the environment is next."""
        if not segments or not self._environment.on or segments[-1].version == GIVEN:
            return False
        return int(segments[-1].tokens[-1]) in self._tokenizer.eos_ids

    def _turns(self, segments: tuple[Segment, ...]) -> tuple[str, ...]:
        """The model's and the environment's in alternation."""
        turns: list[str] = []
        sampled: list[int] = []
        for segment in segments:
            tokens = segment.tokens.tolist()
            if segment.version == GIVEN:
                turns += [self._tokenizer.decode(sampled), self._tokenizer.decode_turn(tokens, self._rollout)]
                sampled = []
            else:
                sampled += tokens
        return (*turns, self._tokenizer.decode(sampled)) if sampled else tuple(turns)

    def _abort(self, request_id: str) -> None:
        task = asyncio.create_task(self._engine.abort(request_id))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)


def _turn(opening: Request, segments: tuple[Segment, ...]) -> Request:
    """The request for the rest of the turn that the segments lead to."""
    if not segments:
        return opening
    said = [token for segment in segments for token in segment.tokens.tolist()]
    number = sum(segment.version == GIVEN for segment in segments)
    before = 0
    if number:
        last = max(index for index, segment in enumerate(segments) if segment.version == GIVEN)
        before = sum(map(len, segments[: last + 1]))
    sampled = max((index for index, segment in enumerate(segments) if segment.version != GIVEN), default=-1)
    sampling = opening.sampling
    return msgspec.structs.replace(
        opening,
        tokens=(*opening.tokens, *said),
        sampling=msgspec.structs.replace(sampling, max_tokens=sampling.max_tokens - before),
        seed=random_stream(opening.seed, number) if number else opening.seed,
        resumed=len(said) - before,
        routed=len(opening.tokens) + sum(map(len, segments[: sampled + 1])) - 1 if sampled >= 0 else 0,
    )
