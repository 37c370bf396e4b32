"""Run directories with a known bottleneck, made in milliseconds.

A clock that nobody waits for drives the real buffer, the real recorder and the real summary, so every file has the
format of a real run. What takes how long is the scenario's; who therefore waits for whom follows from the buffer.
"""

import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from rich.console import Console

from asyncrl.buffer.store import TrajectoryBuffer
from asyncrl.config import Checkpoint, Flow, Reward, Rollout, Run
from asyncrl.data.arrow import encode
from asyncrl.data.episodes import agent_figures, played
from asyncrl.data.tokenizer import save_character_tokenizer
from asyncrl.system import run_directory
from asyncrl.system.run_directory import RunDirectory, replace
from asyncrl.types import Branch, Delivery, Episode, Segment, Slot, Ticket, Trajectory, Turn
from asyncrl.user_code.protocol import RewardStats
from pipelines.compose import to_yaml
from pipelines.evaluate import Scores
from pipelines.recording import summary
from pipelines.recording.progress import Progress
from pipelines.recording.recorder import Recorder

BEGIN = 1_700_000_000.0
CHARACTERS = "".join(chr(code) for code in range(32, 127))


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A balanced run: a second to generate, half of one to train. Seconds, unless said otherwise."""

    steps: int = 12
    groups: int = 4
    group_size: int = 4
    engines: int = 2
    staleness: int = 1
    token: float = 0.02
    median_tokens: int = 40
    spread: float = 0.1
    long_share: float = 0.0
    """Of the answers: as much longer as `long_times` says."""
    long_times: float = 20.0
    reward: float = 0.001
    workers: int = 1
    train: float = 0.05
    """For a group."""
    update: float = 0.1
    sync: float = 0.05
    lagging: float = 0.0
    """Share of the groups whose tokens are from weights that were too old when they came: the buffer drops them."""
    turns: int = 0
    """Of an agent, in each sample: the last one is a branch. 0: there is none."""
    text: str = ""
    """What every answer says, instead of random characters."""
    status: str = "ok"
    error: str | None = None


SLOW_REWARD = Scenario(reward=0.5)
SLOW_TRAINER = Scenario(train=1.0)
LONG_TAIL = Scenario(staleness=0, long_share=1 / 16)
SLOW_SYNC = Scenario(sync=5.0)
STALE_DROPS = Scenario(lagging=0.4, token=0.05)
SLOW_ENGINES = Scenario(token=0.2)


@dataclass
class _Clock:
    now: float = BEGIN
    due: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list[Any])
    numbers: Iterator[int] = field(default_factory=count)

    def at(self, moment: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.due, (moment, next(self.numbers), act))

    def until(self, done: Callable[[], bool]) -> None:
        while not done():
            self.now, _, act = heapq.heappop(self.due)
            act()

    def sleep(self, seconds: float) -> None:
        awake: list[bool] = []
        self.at(self.now + seconds, lambda: awake.append(True))
        self.until(lambda: bool(awake))

    def time(self) -> float:
        return self.now


def write_run(root: Path, scenario: Scenario, name: str = "run", seed: int = 0) -> Path:
    """The directory of a finished run, or of one that stopped with `status` and `error`."""
    clock = _Clock()
    with patch.object(run_directory, "time", clock):
        return _Synthetic(root, scenario, name, seed, clock).write()


class _Synthetic:
    def __init__(self, root: Path, scenario: Scenario, name: str, seed: int, clock: _Clock) -> None:
        self.scenario, self.clock, self.random = scenario, clock, np.random.default_rng(seed)
        self.run = Run(
            name=name,
            root=str(root),
            steps=scenario.steps,
            max_staleness=scenario.staleness,
            model=Checkpoint(path=str(root / name / "model")),
            rollout=Rollout(replicas=scenario.engines, group_size=scenario.group_size, max_tokens=4096),
            flow=Flow(groups_per_step=scenario.groups, groups_per_take=1),
            reward=Reward(function="my_reward.py:reward", workers=scenario.workers),
        )
        self.directory = RunDirectory.create(root / name)
        replace(self.directory.config, to_yaml(self.run).encode())
        self.directory.model.mkdir()
        save_character_tokenizer(self.directory.model, CHARACTERS, "<end>", 4096)
        self.buffer = TrajectoryBuffer(
            self.directory.trajectories, name, self.run.buffer, group_size=scenario.group_size,
            groups_per_step=scenario.groups, max_staleness=scenario.staleness, group_timeout_s=1e9,
            total_steps=scenario.steps,
        )  # fmt: skip
        self.recorder = Recorder(self.run, self.directory, Progress(self.run, Console(quiet=True)), first_step=0)
        self.free = [clock.now] * scenario.workers
        self.judging = RewardStats()
        self.running = self.generated = self.version = 0
        self.publishing = False
        self.rewards: dict[int, list[float]] = {}
        self.played: dict[int, list[Trajectory]] = {}

    def write(self) -> Path:
        self.recorder.event("environment", found={"python": "3.11", "asyncrl": "synthetic"})
        self.recorder.event("fleet_started", first_step=0)
        self._evaluate(0)
        self.recorder.event("loop_started")
        begun = self.clock.now
        self._admit()
        for step in range(self.scenario.steps):
            self._step(step, begun)
        self.clock.until(lambda: not self.publishing)
        self.recorder.event("loop_ended")
        self._evaluate(self.scenario.steps)
        summary.write(
            self.directory, self.recorder, status=self.scenario.status, error=self.scenario.error,
            ledger=self.buffer.ledger(), waste=self.buffer.waste(),
        )  # fmt: skip
        self.recorder.close()
        self.buffer.close()
        return self.directory.path

    def _evaluate(self, step: int) -> None:
        begun, score = self.clock.now, 0.3 + 0.5 * step / self.scenario.steps
        self.clock.sleep(0.3)
        scores = Scores(
            sampled=score, greedy=score + 0.1, by_size={}, reward=score, median_tokens=40, p95_tokens=60, max_tokens=90,
            passed=score, interval=0.01,
        )  # fmt: skip
        self.recorder.span("evaluation", begun, step=step, scores=scores)
        self.recorder.evaluations[step] = {name: getattr(scores, name) for name in scores.__struct_fields__}

    def _admit(self) -> None:
        while isinstance(ticket := self.buffer.admit(self.clock.now), Ticket):
            lags = self.version > self.scenario.staleness and self.random.random() < self.scenario.lagging
            version = self.version - self.scenario.staleness - 1 if lags else self.version
            for sample in ticket.samples:
                self._generate(Slot(ticket.group, sample), version)

    def _generate(self, slot: Slot, version: int) -> None:
        scenario, started = self.scenario, self.clock.now
        tokens = max(1, round(scenario.median_tokens * float(np.exp(scenario.spread * self.random.standard_normal()))))
        if self.random.random() < scenario.long_share:
            tokens = round(tokens * scenario.long_times)
        if scenario.text:
            ids = [2 + CHARACTERS.index(character) for character in scenario.text]
        else:
            ids = self.random.integers(2, 2 + len(CHARACTERS), tokens)
        prompt = Segment.given([2 + CHARACTERS.index(character) for character in f"What is {slot.group}?"])
        sampled = Segment.sampled(ids, -self.random.exponential(0.5, len(ids)), version)
        segments, episode = (prompt, sampled), None
        if scenario.turns:
            segments, episode = self._episode(prompt, sampled, tokens * scenario.token)
        trajectory = Trajectory(
            slot=slot,
            prompt=f"synthetic/train/{slot.group}",
            segments=segments,
            episode=episode,
            reward=float(self.random.random() < 0.3 + 0.4 * version / scenario.steps),
            finish="stop",
            started=started,
            finished=started + tokens * scenario.token,
            engine=f"rollout-{(slot.group + slot.sample) % scenario.engines}",
        )
        self.running += 1
        self.clock.at(trajectory.finished, lambda: self._judge(trajectory))

    def _episode(self, prompt: Segment, turn: Segment, seconds: float) -> tuple[tuple[Segment, ...], Episode]:
        """Every turn the same, a tool's result between them; before the last one history was edited."""
        result = Segment.given([2 + CHARACTERS.index(character) for character in "[tool says 42]"])
        segments, turns, branches = [prompt], list[Turn](), list[Branch]()
        for number in range(self.scenario.turns):
            if number:
                if number == self.scenario.turns - 1:
                    branches.append(Branch(sum(map(len, segments)), len(prompt) - 1, "history_edited"))
                segments.append(result)
            start = sum(map(len, segments))
            segments.append(turn)
            turns.append(Turn(start, start + len(turn), 0.5 if number else 0.0, tool_calls=number))
        return tuple(segments), Episode(
            branches=tuple(branches), turns=tuple(turns), model_s=seconds / 2, tools_s=seconds / 4, wasted_tokens=3
        )

    def _judge(self, trajectory: Trajectory) -> None:
        self.running -= 1
        self.generated += trajectory.sampled_tokens
        worker = self.free.index(min(self.free))
        begun = max(self.free[worker], self.clock.now)
        self.free[worker] = ended = begun + self.scenario.reward
        came = self.clock.now

        def judged() -> None:
            self.judging.add(1, came, begun, ended)
            self.buffer.append(encode(trajectory))
            self.rewards.setdefault(trajectory.slot.group, []).append(trajectory.reward)
            self.played.setdefault(trajectory.slot.group, []).append(trajectory)

        self.clock.at(ended, judged)

    def _step(self, step: int, begun: float) -> None:
        taken, waited, first, groups = 0, 0.0, self.clock.now, list[int]()
        while taken < self.scenario.groups:
            since = self.clock.now
            delivery = self._take(self.scenario.groups - taken)
            waited += self.clock.now - since
            self.recorder.span("wait_batch", since, step=step, groups=len(delivery.groups))
            with self._span("train", step=step, groups=len(delivery.groups)):
                self.clock.sleep(self.scenario.train * len(delivery.groups))
            taken += len(delivery.groups)
            groups += delivery.groups
        with self._span("wait_sync", step=step):
            self.clock.until(lambda: not self.publishing)
        with self._span("update", step=step):
            self.clock.sleep(self.scenario.update)
        self.buffer.commit(step)
        self.publishing = True
        self._publish(step + 1)
        self._row(step, groups, waited, first, begun)

    @contextmanager
    def _span(self, kind: str, **fields: Any) -> Iterator[None]:
        begun = self.clock.now
        yield
        self.recorder.span(kind, begun, **fields)

    def _take(self, most: int) -> Delivery:
        found: list[Delivery] = []

        def took() -> bool:
            if delivery := self.buffer.take(most):
                found.append(delivery)
            else:
                self._admit()  # what was dropped has left its place
            return bool(found)

        self.clock.until(took)
        return found[0]

    def _publish(self, version: int) -> None:
        begun = self.clock.now

        def published() -> None:
            self.buffer.advance(version)
            self.version, self.publishing = version, False
            self.recorder.span("publish", begun, version=version)
            self._admit()

        self.clock.at(begun + self.scenario.sync, published)

    def _row(self, step: int, groups: list[int], waited: float, first: float, begun: float) -> None:
        rewards = [reward for group in groups for reward in self.rewards.pop(group)]
        trained = [played(self.played.pop(group)) for group in groups]
        ledger = self.buffer.ledger()
        figures = {f"reward_{name}": getattr(self.judging, name) for name in self.judging.__struct_fields__}
        self.recorder.rows.append(
            {
                "step": step, "version": step + 1, "time": self.clock.now, "loop_seconds": self.clock.now - begun,
                "samples": len(rewards), "tokens": self.generated, "reward": sum(rewards) / len(rewards), "loss": 0.0,
                "grad_norm": 1.0, "skipped": False, "ess": 0.99, "mismatch_kl": 0.001, "mismatch_abs": 0.002,
                "staleness_mean": 1.0, "staleness_max": self.scenario.staleness, "length_mean": 40.0, "length_max": 99,
                "wait_seconds": waited, "train_seconds": self.scenario.train * len(groups), "effective_staleness": 1,
                "publish_every": 1, "sync_seconds": self.scenario.sync, "reprefilled_tokens": 0,
                "generated_tokens": self.generated, "replicas": self.scenario.engines, "running": self.running,
                "waiting": 0, "drafts": 0, "drafted_tokens": 0, "accepted_tokens": 0, "accepted_by_position": [],
                "speculation_net_gain": None, "speculation": [], "drafter": None, "in_flight": ledger.in_flight,
                "buffered": ledger.buffered, "dropped": sum(ledger.dropped.values()), "first_work": first,
                "first_wave_finished": first, **figures, **agent_figures(trained),
            }
        )  # fmt: skip


CASES = {
    "generation": SLOW_ENGINES, "tail": LONG_TAIL, "reward": SLOW_REWARD, "training": SLOW_TRAINER, "sync": SLOW_SYNC,
    "stale": STALE_DROPS,
}  # fmt: skip
"""Scenarios by what bounds them."""
