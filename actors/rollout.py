"""The rollout actor: tickets in, scored trajectories into the buffer.

Each finished answer leaves at once: it is scored and appended while its siblings and the long tail are still being
written. Finished answers of the same few milliseconds travel together, so that small models do not drown in calls.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import xxhash

from actors.buffer import BufferActor
from actors.reward import RewardActor
from asyncrl.config import Run
from asyncrl.data.arrow import encode
from asyncrl.data.tokenizer import Tokenizer, load_tokenizer
from asyncrl.engines.base import Engine
from asyncrl.engines.build import build_engine
from asyncrl.errors import EngineError
from asyncrl.rewards.base import RewardFailure, RewardInput
from asyncrl.types import (
    EngineStats,
    Finish,
    Prompt,
    Request,
    Sampling,
    Segment,
    Slot,
    Ticket,
    Trajectory,
    WeightAck,
    WeightManifest,
)

GATHER_SECONDS = 0.05
"""How long finished answers wait for company before they are scored and appended together."""


class Answer(msgspec.Struct, frozen=True):
    """What an engine made of one request."""

    segments: tuple[Segment, ...]
    finish: Finish
    started: float
    finished: float


class Judged(msgspec.Struct, frozen=True, array_like=True):
    """One evaluated answer."""

    reward: float
    tokens: int


class RolloutActor:
    """Owns one engine."""

    def __init__(self, run: Run, model_path: Path, name: str, buffer: BufferActor, reward: RewardActor) -> None:
        self._run = run
        self._name = name
        self._buffer = buffer
        self._reward = reward
        self._tokenizer: Tokenizer = load_tokenizer(model_path)
        self._engine: Engine = build_engine(run, model_path, name=name)
        self._outbox: list[tuple[RewardInput, Trajectory]] = []
        self._flushing: asyncio.Task[None]
        self._aborts: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        await self._engine.start()

    async def generate(self, work: list[tuple[Ticket, Prompt]]) -> None:
        """Generate the samples of these tickets; returns when each is durable or its end is recorded."""
        async with asyncio.TaskGroup() as tasks:
            for ticket, prompt in work:
                tokens = tuple(self._tokenizer.encode_prompt(prompt, self._run.rollout))
                for sample in ticket.samples:
                    tasks.create_task(self._sample(Slot(ticket.group, sample), prompt, tokens, ticket.deadline))

    async def _sample(self, slot: Slot, prompt: Prompt, tokens: tuple[int, ...], deadline: float) -> None:
        request = Request(
            id=f"{slot.group}/{slot.sample}",
            tokens=tokens,
            sampling=self._sampling(),
            seed=_seed(self._run.seed, "train", slot.group, slot.sample),
        )
        try:
            answer = await self._answer(request, deadline)
        except EngineError:
            await self._buffer.fail(slot, "engine_error")
            return
        if answer.finish == "abort":
            await self._buffer.fail(slot, "timeout", sum(map(len, answer.segments)))
            return
        trajectory = Trajectory(
            slot=slot,
            prompt=prompt.uid,
            segments=(Segment.given(request.tokens), *answer.segments),
            reward=0.0,
            finish=answer.finish,
            started=answer.started,
            finished=answer.finished,
            engine=self._name,
            precision=self._run.rollout.precision,
        )
        await self._hand_over(self._reward_input(prompt, answer), trajectory)

    async def _answer(self, request: Request, deadline: float) -> Answer:
        """Run one request to its end; past the deadline it is aborted, and what came so far is returned."""
        segments: list[Segment] = []
        finish: Finish = "abort"
        started = time.time()
        alarm = asyncio.get_running_loop().call_later(max(0.0, deadline - started), self._abort, request.id)
        try:
            async for delta in self._engine.submit(request):
                if len(delta.segment):
                    segments.append(delta.segment)
                finish = delta.finish or finish
        finally:
            alarm.cancel()
        return Answer(tuple(segments), finish, started, time.time())

    def _abort(self, request_id: str) -> None:
        task = asyncio.create_task(self._engine.abort(request_id))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    def _sampling(self, *, greedy: bool = False) -> Sampling:
        rollout = self._run.rollout
        return Sampling(
            max_tokens=rollout.max_tokens,
            temperature=0.0 if greedy else rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop=self._tokenizer.eos_ids,
        )

    def _reward_input(self, prompt: Prompt, answer: Answer) -> RewardInput:
        tokens = [token for segment in answer.segments for token in segment.tokens.tolist()]
        return RewardInput(prompt=prompt.text, completion=self._tokenizer.decode(tokens), answer=prompt.answer)

    async def _hand_over(self, judged: RewardInput, trajectory: Trajectory) -> None:
        """Join the next batch; its failure is that of every answer in it."""
        if not self._outbox:
            self._flushing = asyncio.create_task(self._flush_soon())
            self._flushing.add_done_callback(_notice)
        self._outbox.append((judged, trajectory))
        await asyncio.shield(self._flushing)

    async def _flush_soon(self) -> None:
        await asyncio.sleep(GATHER_SECONDS)
        batch, self._outbox = self._outbox, []
        await self._flush(batch)

    async def _flush(self, batch: Sequence[tuple[RewardInput, Trajectory]]) -> None:
        results = await self._reward.score([judged for judged, _ in batch])
        payloads: list[bytes] = []
        for result, (_, trajectory) in zip(results, batch, strict=True):
            if isinstance(result, RewardFailure):
                await self._buffer.fail(trajectory.slot, result.reason, trajectory.sampled_tokens)
            else:
                payloads.append(encode(msgspec.structs.replace(trajectory, reward=result)))
        if payloads:
            await self._buffer.append(payloads)

    async def evaluate(self, prompts: list[Prompt], *, greedy: bool, seed: int) -> list[Judged]:
        """Answer held-out prompts beside the training work; nothing of it enters the buffer."""
        deadline = time.time() + self._run.flow.stall_timeout_s
        requests = [
            Request(
                id=f"eval/{seed}/{greedy}/{number}",
                tokens=tuple(self._tokenizer.encode_prompt(prompt, self._run.rollout)),
                sampling=self._sampling(greedy=greedy),
                seed=_seed(seed, "held_out", number),
            )
            for number, prompt in enumerate(prompts)
        ]
        answers = await asyncio.gather(*(self._answer(request, deadline) for request in requests))
        inputs = [self._reward_input(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        results = await self._reward.score(inputs)
        return [
            Judged(0.0 if isinstance(result, RewardFailure) else result, sum(map(len, answer.segments)))
            for result, answer in zip(results, answers, strict=True)
        ]

    async def load_weights(self, manifest: WeightManifest) -> WeightAck:
        return await self._engine.load_weights(manifest, self._run.rollout.on_update)

    async def load_drafter(self, manifest: WeightManifest) -> WeightAck:
        return await self._engine.load_drafter(manifest)

    async def stats(self) -> EngineStats:
        return self._engine.stats()

    async def close(self) -> None:
        await self._engine.close()


def _notice(task: asyncio.Task[None]) -> None:
    """Look at a failure even if everyone who waited for it was cancelled by another one, which then is reported."""
    if not task.cancelled():
        task.exception()


def _seed(*parts: int | str) -> int:
    """A random stream of its own for each sample, the same in every attempt."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, parts)).encode())
