"""The rollout actor: tickets in, scored trajectories into the buffer.

Each finished answer leaves at once: it is scored and appended while its siblings and the long tail are still being
written. Finished answers of the same few milliseconds travel together, so that small models do not drown in calls.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from pathlib import Path

import msgspec

from actors.buffer import BufferActor
from actors.drafter.actor import DrafterActor
from actors.drafter.hidden_stream import HiddenRollouts
from actors.gateway.actor import GatewayActor, Play
from actors.gateway.calls import HELD_OUT
from actors.reward import RewardActor
from actors.rollout.delivery import DeliveryQueue, ProgressReporter
from actors.rollout.episodes import EpisodePlayer
from actors.rollout.generation import Completion, CompletionGenerator, TokenizedPrompt, batches, tokenize
from actors.rollout.quarantine import Quarantine
from actors.teacher import TeacherActor, Teachers
from asyncrl.config import Run
from asyncrl.config.precision import served_precision
from asyncrl.data.tokenizer import Tokenizer, load_tokenizer
from asyncrl.drafting.bandit import Range
from asyncrl.drop_reasons import DropReason
from asyncrl.engines.base import Engine
from asyncrl.engines.cooperative import turns
from asyncrl.engines.registry import build_engine
from asyncrl.errors import EngineError, WeightSyncError, first_cause
from asyncrl.fleet.concurrency import gather_seconds
from asyncrl.observe.diagnosis.activity import RolloutActivity
from asyncrl.observe.diagnosis.snapshot import Situation
from asyncrl.system.random_streams import random_stream
from asyncrl.types import (
    EngineStats,
    Probe,
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
from asyncrl.user_code.protocol import RewardFailure, RewardResult
from asyncrl.user_code.score import Score
from asyncrl.weights import probe
from asyncrl.weights.transports.registry import addressed_to, to_file


class Judged(msgspec.Struct, frozen=True, array_like=True):
    """One evaluated completion."""

    reward: float
    tokens: int


class RolloutActor:
    """Owns one engine."""

    def __init__(
        self,
        run: Run,
        model_path: Path,
        name: str,
        buffer: BufferActor,
        reward: RewardActor,
        drafter: DrafterActor | None = None,
        learned: Sequence[Range] = (),
        gateway: GatewayActor | None = None,
        teachers: Sequence[TeacherActor] = (),
    ) -> None:
        """`drafter` gets hidden states of some samples; `learned`: what an earlier engine learned about drafting;
        `gateway`: who plays episodes, in a run of an agent; `teachers`: those of the run, in its order."""
        self._run = run
        self._name = name
        self._buffer = buffer
        self._reward = reward
        self._tokenizer: Tokenizer = load_tokenizer(model_path)
        engines = max(run.rollout.replicas, run.elastic.max)
        self._hidden = None if drafter is None else HiddenRollouts(run, model_path, name, drafter, engines)
        tap = None if self._hidden is None else self._hidden.tap
        self._engine: Engine = build_engine(run, model_path, name=name, tap=tap, learned=learned)
        self._delivery = DeliveryQueue(
            buffer,
            reward,
            lambda slot, stage: self._activity.stage(slot, stage),
            gather_seconds(engines),
            staged=bool(run.stages),
            compared=run.reward.judge.pairs > 0,
            teachers=Teachers(run.teachers, teachers) if teachers else None,
        )
        self._gateway = gateway
        self._progress = ProgressReporter(buffer.note if gateway is None else gateway.note, engines)
        self._generator = CompletionGenerator(run, self._engine, self._tokenizer, reward)
        self._quarantine = Quarantine()
        self._evaluations = count()
        self._activity = RolloutActivity()
        self._episodes: EpisodePlayer | None = None
        """Once started, in a run of an agent."""
        self._served: WeightManifest | None = None
        """Of the version that the engine serves; none before the first."""
        self._started = False

    async def start(self) -> None:
        self._started = True
        await self._engine.start()
        if self._gateway is not None:
            self._episodes = EpisodePlayer(
                self._name,
                self._gateway,
                self._engine,
                self._generator,
                self._quarantine,
                served=lambda: -1 if self._served is None else self._served.version,
                samples=self._samples,
            )

    async def started(self) -> bool:
        """Whether this process was told to start before: a restarted one was not."""
        return self._started

    async def generate(
        self, work: list[tuple[Ticket, Prompt]], begun: Mapping[Slot, tuple[Segment, ...]] | None = None
    ) -> None:
        """Generate the samples of these tickets; returns when each is durable or its end is recorded, or, after
        `drain`, the buffer knows how far it came.

        `begun` is what another engine had sampled of some of them before it died or left; they go on from there.
        """
        work = await self._not_parked(work)
        try:
            if self._episodes is not None:
                await self._play(work, self._episodes)
            else:
                await self._complete(work, begun or {})
        except ExceptionGroup as group:
            raise first_cause(group) from None  # an EngineError has others continue its samples

    async def _not_parked(self, work: list[tuple[Ticket, Prompt]]) -> list[tuple[Ticket, Prompt]]:
        """Without samples that had finished before their group came here, and wait to be compared with these."""
        if not self._run.reward.judge.pairs:
            return work
        parked = set(await self._reward.parked([ticket.group for ticket, _ in work]))
        missing = [tuple(n for n in ticket.samples if Slot(ticket.group, n) not in parked) for ticket, _ in work]
        return [
            (msgspec.structs.replace(ticket, samples=samples), prompt)
            for (ticket, prompt), samples in zip(work, missing, strict=True)
            if samples
        ]

    async def _complete(self, work: list[tuple[Ticket, Prompt]], known: Mapping[Slot, tuple[Segment, ...]]) -> None:
        unfinished = dict[Slot, tuple[Segment, ...]]()
        async with asyncio.TaskGroup() as tasks:
            for some in batches(work):
                for tokenized in await tokenize(some, self._tokenizer, self._run.rollout):
                    for sample in tokenized.ticket.samples:
                        slot = Slot(tokenized.ticket.group, sample)
                        sampling = self._sample(slot, tokenized, known.get(slot, ()), unfinished)
                        tasks.create_task(self._activity.follow(slot, sampling))
                await turns()  # all groups of a step at once would delay the next tokens of running requests
        if unfinished:
            await self._buffer.note(unfinished)

    async def drain(self) -> None:
        """Generate no further: running requests are stopped where they are, for other engines to continue. Finished
        completions are still scored and stored, and held-out ones are finished."""
        self._generator.leaving = True
        for request in self._quarantine.under_way:
            await self._engine.abort(request)
        if self._episodes is not None:
            await self._episodes.leave()

    async def _play(self, work: list[tuple[Ticket, Prompt]], episodes: EpisodePlayer) -> None:
        """The same for episodes. How far they have come is the gateway's to know."""
        async with asyncio.TaskGroup() as tasks:
            for ticket, prompt in work:
                for slot in (Slot(ticket.group, sample) for sample in ticket.samples):
                    playing = self._play_one(slot, prompt, ticket.deadline, episodes)
                    tasks.create_task(self._activity.follow(slot, playing))

    async def _play_one(self, slot: Slot, prompt: Prompt, deadline: float, episodes: EpisodePlayer) -> None:
        if self._generator.leaving:
            return
        name, seed = f"{slot.group}.{slot.sample}", random_stream(self._run.seed, "train", slot.group, slot.sample)
        self._activity.stage(slot, "agent")
        played = await episodes.play(name, Play(prompt, self._sampling(), seed, deadline))
        if played is None or self._delivery.closed:
            return
        if played.failure is not None:
            await self._buffer.fail(slot, played.failure.reason, played.sampled_tokens)
        else:
            trajectory = Trajectory(
                slot=slot,
                prompt=prompt.uid,
                segments=played.segments,
                reward=0.0,
                finish=played.finish,
                started=played.started,
                finished=played.finished,
                engine=self._name,
                precision=served_precision(self._run, self._served),
                episode=played.episode,
            )
            self._activity.stage(slot, "reward")
            await self._delivery.submit(played.judged, trajectory, played.score)
        await episodes.drop([name])

    def _samples(self, episode: str, working: bool) -> None:
        """Whether the engine works for an episode at this moment."""
        if not episode.startswith(HELD_OUT):
            group, sample = episode.split(".")
            self._activity.stage(Slot(int(group), int(sample)), "generate" if working else "agent")

    async def _sample(
        self,
        slot: Slot,
        tokenized: TokenizedPrompt,
        begun: tuple[Segment, ...],
        unfinished: dict[Slot, tuple[Segment, ...]],
    ) -> None:
        if self._generator.leaving:
            unfinished[slot] = begun
            return
        name = f"{slot.group}/{slot.sample}"
        request = Request(
            id=name,
            tokens=tokenized.tokens,
            sampling=self._sampling(),
            seed=random_stream(self._run.seed, "train", slot.group, slot.sample),
            conversation=name if self._run.environment.on else "",
        )
        with self._offered(request):
            with self._quarantine.running(request.id):
                try:
                    answer = await self._generator.converse(
                        request,
                        tokenized.prompt,
                        tokenized.ticket.deadline,
                        begun,
                        slot,
                        lambda waits: self._activity.stage(slot, "environment" if waits else "generate"),
                    )
                except EngineError:
                    if self._engine.refusal:
                        raise  # it is of no use any more: other engines have to continue its samples
                    await self._buffer.fail(slot, DropReason.ENGINE_ERROR)
                    return
                finally:
                    self._generator.begun.pop(slot, None)
                self._activity.stage(slot, "verdict")
                spoiled = await self._quarantine.spoiled(request.id)
            if self._delivery.closed:
                return
            if spoiled:
                await self._buffer.fail(slot, DropReason.UNVERIFIED, answer.sampled_tokens)
                return
            if answer.failure is not None:
                await self._buffer.fail(slot, answer.failure.reason, answer.sampled_tokens)
                return
            if answer.finish == "abort":
                if answer.finished >= tokenized.ticket.deadline:  # else the engine was closed; a resumed run asks again
                    await self._buffer.fail(slot, DropReason.TIMEOUT, answer.sampled_tokens)
                elif self._generator.leaving:
                    unfinished[slot] = answer.segments
                return
            await self._submit(request, slot, tokenized, answer)

    async def _submit(self, request: Request, slot: Slot, tokenized: TokenizedPrompt, answer: Completion) -> None:
        """To be scored and stored."""
        trajectory = Trajectory(
            slot=slot,
            prompt=tokenized.prompt.uid,
            segments=(tokenized.segment, *answer.segments),
            reward=0.0,
            finish=answer.finish,
            started=answer.started,
            finished=answer.finished,
            engine=self._name,
            precision=served_precision(self._run, self._served),
        )
        if self._hidden is not None:
            self._hidden.send(request.id, trajectory)
        self._activity.stage(slot, "reward")
        await self._delivery.submit(self._generator.reward_input(tokenized.prompt, answer), trajectory)

    def _offered(self, request: Request) -> AbstractContextManager[None]:
        return nullcontext() if self._hidden is None else self._hidden.offered(request)

    def _sampling(self, *, greedy: bool = False) -> Sampling:
        rollout = self._run.rollout
        return Sampling(
            max_tokens=rollout.max_tokens,
            temperature=0.0 if greedy else rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop=self._tokenizer.eos_ids,
        )

    async def evaluate(self, prompts: list[Prompt], *, greedy: bool, seed: int, suite: str = "") -> list[Judged]:
        """Complete held-out prompts beside the training work; nothing of it enters the buffer."""
        deadline = time.time() + self._run.flow.stall_timeout_s
        evaluation = next(self._evaluations)
        if self._episodes is not None:
            sampling, name = self._sampling(greedy=greedy), f"{HELD_OUT}{self._episodes.name}.{evaluation}"
            plays = {
                f"{name}.{number}": Play(prompt, sampling, random_stream(seed, "held_out", number), deadline)
                for number, prompt in enumerate(prompts)
            }
            return await self._evaluate_episodes(plays, self._episodes)
        requests = [
            Request(
                id=(name := f"eval/{evaluation}/{number}"),
                tokens=tuple(self._tokenizer.encode_prompt(prompt, self._run.rollout)),
                sampling=self._sampling(greedy=greedy),
                seed=random_stream(seed, "held_out", number),
                conversation=name if self._run.environment.on else "",
            )
            for number, prompt in enumerate(prompts)
        ]
        tokenized = [self._generator.converse(r, prompt, deadline) for r, prompt in zip(requests, prompts, strict=True)]
        answers = await asyncio.gather(*map(self._activity.evaluation, tokenized))
        inputs = [self._generator.reward_input(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        results = await self._activity.during(
            "the rewards of held-out answers", self._reward.score(inputs, suite), on="reward"
        )
        return [Judged(_total(result), answer.sampled_tokens) for result, answer in zip(results, answers, strict=True)]

    async def _evaluate_episodes(self, plays: Mapping[str, Play], episodes: EpisodePlayer) -> list[Judged]:
        playing = [self._activity.evaluation(episodes.play(name, play)) for name, play in plays.items()]
        played = await asyncio.gather(*playing)
        await episodes.drop(list(plays))
        unscored = [each.judged for each in played if each and each.failure is None and each.score is None]
        scoring = self._reward.score(unscored)
        scores = iter(await self._activity.during("the rewards of held-out answers", scoring, on="reward"))
        return [
            Judged(_total(each.failure or each.score or next(scores)), each.sampled_tokens) if each else Judged(0.0, 0)
            for each in played
        ]

    async def load_weights(self, manifest: WeightManifest) -> WeightAck:
        """Serve the version if it arrives whole and passes the probe; else the one before."""
        manifest = addressed_to(manifest, self._name)
        async with self._quarantine.hold():
            loading = self._engine.load_weights(manifest, self._run.rollout.on_update)
            ack = await self._activity.during(f"loading version {manifest.version}", loading)
            gap = None if manifest.probe is None else await self._probe(manifest.probe, manifest.version)
            if manifest.probe is not None and gap is not None and not gap <= manifest.probe.tolerance:
                await self._go_back()
                raise WeightSyncError(
                    f"engine {self._name} does not compute what the trainer does under version {manifest.version}: "
                    f"log-probabilities after fixed prompts differ by {gap:.3g}, allowed are "
                    f"{manifest.probe.tolerance:g}; {self._kept()}"
                )
        self._served = manifest
        if self._run.recovery.max_restarts:
            self._progress.begin(self._generator.begun if self._episodes is None else self._episodes.begun)
        return msgspec.structs.replace(ack, probe_gap=gap)

    async def _probe(self, wanted: Probe, version: int) -> float:
        deadline = time.time() + self._run.weights.deadline_s
        answers = await asyncio.gather(*(self._generator.answer(r, deadline) for r in probe.requests(wanted, version)))
        return probe.gap(wanted, [float(s.logprobs[0]) for answer in answers for s in answer.segments])

    async def _go_back(self) -> None:
        """Drop what the bad version may have sampled, and serve the one before, if it was published."""
        for request in self._quarantine.reject():
            await self._engine.abort(request)
        if self._episodes is not None:
            self._episodes.begun.clear()
        self._generator.begun.clear()  # no engine may continue what the bad version sampled
        if self._served is not None:
            await self._engine.load_weights(self._served, "recompute")

    def _kept(self) -> str:
        if self._served is None:
            return "no version before it was published, so start the engine again"
        return f"version {self._served.version} is served again"

    async def export(self, folder: Path) -> WeightManifest:
        """What this engine serves, as a file for a replica that joins late."""
        if self._served is None:
            raise WeightSyncError(f"engine {self._name} has been given no version yet; ask the trainer")
        return await asyncio.to_thread(to_file, self._served, folder)  # the engine goes on meanwhile

    async def load_drafter(self, manifest: WeightManifest) -> WeightAck:
        return await self._engine.load_drafter(manifest)

    async def stats(self) -> EngineStats:
        return self._engine.stats()

    async def learned(self) -> list[Range]:
        return self._engine.learned()

    def situation(self) -> Situation:
        return self._activity.rollout_situation(self._engine.stats())

    async def close(self) -> None:
        await self._delivery.close()
        await self._engine.close()
        if self._episodes is not None:
            await self._episodes.close()


def _total(result: RewardResult) -> float:
    """Held-out completions without a reward count as wrong."""
    if isinstance(result, RewardFailure):
        return 0.0
    return result.total if isinstance(result, Score) else result
