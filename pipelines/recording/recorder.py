"""The recorder of a run: one row of metrics per step, events, progress and trackers. The summary is made from them."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any

import msgspec
from rich.markup import escape

from actors.fleet import Fleet
from actors.publisher import Published
from actors.trainer.actor import Accumulated
from asyncrl.buffer.retention import Pruning
from asyncrl.config import Run
from asyncrl.config.trackers import TrackerName
from asyncrl.data.episodes import agent_figures
from asyncrl.data.reward_parts import reward_parts
from asyncrl.drafting.bandit import Range
from asyncrl.drafting.gain import Notice, net_gain
from asyncrl.errors import ActorError
from asyncrl.fleet.placement import HERE
from asyncrl.fleet.staleness import Decision
from asyncrl.judges.store import JudgeStats
from asyncrl.observe.trackers.base import Session
from asyncrl.observe.trackers.registry import TRACKERS, Trackers, opener
from asyncrl.system.processes import resident_bytes
from asyncrl.system.run_directory import Events, RunDirectory, read_events, replace
from asyncrl.training.report import StepReport
from asyncrl.types import EngineStats
from asyncrl.user_code.failures import FunctionFailure
from pipelines.evaluate import Scores
from pipelines.recording.metrics import MetricsRows, Row
from pipelines.recording.progress import Progress

METRICS_SECONDS, ROW_SECONDS = 5.0, 0.001
"""Between two writes of metrics.parquet, and for each of its rows: a hundred times what it takes to write a row."""
ENGINE_FIGURES = (
    *("version", "running", "waiting", "generated_tokens", "busy_seconds"),
    *("prefilled_tokens", "cached_tokens"),
)
RAY_TRACKERS: dict[TrackerName, str] = {"prometheus": "actors.runtime.prometheus:open"}
"""Trackers that need Ray, which those of `asyncrl.observe.trackers.registry` may not."""


class Recorder:
    """Writes into the run directory. A resumed run keeps the rows before its first step and replaces the others."""

    def __init__(self, run: Run, directory: RunDirectory, progress: Progress, *, first_step: int) -> None:
        self._run = run
        self._directory = directory
        self._progress = progress
        self._first_step = first_step
        self._events = Events(directory.events, run.events.max_bytes)
        self._trackers = trackers(run, directory, progress.say, first_step=first_step)
        self.rows = MetricsRows(directory.metrics, before=first_step)
        if self.rows.damaged:
            self.event("metrics_damaged", step=first_step, text=self.rows.damaged)
            self._say(escape(self.rows.damaged))
        self.evaluations: dict[int, Row] = {
            event["step"]: event["scores"] for event in read_events(directory.events, "evaluation")
        }
        self._written = 0.0
        self._alarms: set[str] = set()
        self._drafting = Notice()
        self._loop_started = 0.0
        self._earlier_seconds = self.rows[-1]["loop_seconds"] if self.rows else 0.0
        self._generated = Counter[str]()
        """Tokens of each engine since it was started."""
        self._moved = Counter[str]()
        """Samples of each engine that went on at others."""
        self._generated_before = self.rows[-1]["generated_tokens"] if self.rows else 0

    def event(self, kind: str, **fields: Any) -> None:
        self._events.write(kind, **fields)

    def span(self, kind: str, start: float, **fields: Any) -> None:
        self._events.write(kind, start=start, **fields)

    def begin(self) -> None:
        self._loop_started = time.time()
        self.event("loop_started")

    def end(self) -> None:
        self.event("loop_ended")
        self.write_metrics()

    @property
    def loop_seconds(self) -> float:
        """Time spent in the training loop, evaluations left out, over every attempt of the run."""
        return self._earlier_seconds + time.time() - self._loop_started

    async def step(
        self,
        step: int,
        report: StepReport,
        pace: Decision,
        published: Published | None,
        done: Sequence[Accumulated],
        waited: float,
        max_ready: int,
        fleet: Fleet,
    ) -> None:
        """Record one step, published or not; queries the buffer and the engines for their state once."""
        engines = await self._stats(fleet)
        stats = list(engines.values())
        ledger = await fleet.buffer.ledger()
        row: Row = {
            "step": step,
            "version": report.version,
            "time": time.time(),
            "loop_seconds": self.loop_seconds,
            "samples": report.samples,
            "tokens": report.tokens,
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "skipped": report.skipped,
            **report.figures,
            "shares": msgspec.to_builtins(report.shares),
            **_trained(done),
            "wait_seconds": waited,
            "effective_staleness": pace.effective_staleness,
            "publish_every": pace.publish_every,
            "max_ready_groups": max_ready,
            "sync_seconds": published.seconds if published else 0.0,
            "reprefilled_tokens": published.reprefilled_tokens if published else 0,
            "generated_tokens": self._generated_before + self._generated.total(),
            "replicas": len(stats),
            "running": sum(s.running for s in stats),
            "waiting": sum(s.waiting for s in stats),
            "prefilled_tokens": sum(s.prefilled_tokens for s in stats),
            "cached_tokens": sum(s.cached_tokens for s in stats),
            "moved": self._moved.total(),
            "engines": _engines(engines, self._moved),
            **_drafting(stats),
            **{f"reward_{name}": value for name, value in msgspec.structs.asdict(await fleet.reward.stats()).items()},
            **_judged(await fleet.reward.judge_stats()),
            **await _teaching(fleet),
            "resident_bytes": self._memory(),
            "drafter": msgspec.to_builtins(fleet.drafter.status) if fleet.drafter is not None else None,
            "in_flight": ledger.in_flight,
            "buffered": ledger.buffered,
            "dropped": sum(ledger.dropped.values()),
        }
        self._trackers.step(row, self.rows[-1] if self.rows else None)
        self.rows.append(row)
        self._progress.step(row)
        self._warn(report)
        if off := report.off_policy:
            ratios = [round(ratio, 4) for ratio in off.log_ratio]
            self.event("off_policy", step=step, group=off.group, sample=off.sample, log_ratio=ratios)
        self._record_drafting(stats)
        if time.time() - self._written > max(METRICS_SECONDS, ROW_SECONDS * len(self.rows)):
            await asyncio.to_thread(self.write_metrics)

    def _memory(self) -> dict[str, int] | None:
        """Of the processes that the actors had when they were placed; nothing of those on other machines."""
        roles = self._directory.actors
        if self._run.cluster not in HERE or not roles.exists():
            return None
        return resident_bytes(msgspec.json.decode(roles.read_bytes()))

    async def _stats(self, fleet: Fleet) -> dict[str, EngineStats]:
        """Of the engines that answer; the count of one that was started again begins anew."""
        found: dict[str, EngineStats] = {}
        for name, rollout in fleet.state.handles.items():
            with suppress(ActorError):
                found[name] = await rollout.stats()
                self._count(name, found[name])
        return found

    async def learned(self, fleet: Fleet) -> None:
        """What the engines have measured about drafting, for those that come after them."""
        if self._run.drafter.drafting is None:
            return
        found: dict[str, list[Range]] = {}
        for name, rollout in fleet.state.handles.items():
            with suppress(ActorError):
                found[name] = await rollout.learned()
        if any(found.values()):
            replace(self._directory.speculation, msgspec.json.encode(found))

    def _count(self, name: str, stats: EngineStats) -> None:
        if stats.generated_tokens < self._generated[name]:
            self._generated_before += self._generated[name]
        self._generated[name] = stats.generated_tokens

    def _say(self, text: str) -> None:
        """To the terminal and to the trackers."""
        self._progress.say(text)
        self._trackers.note(text)

    def _warn(self, report: StepReport) -> None:
        """Report an alarm when it begins, not in every step that it lasts."""
        if report.skipped:
            self.event("step_skipped", version=report.version, fault=report.fault)
            self._say(f"step {report.version} was skipped, the weights stay: {report.fault}")
        alarms = {text.partition("=")[0]: text for text in report.alarms}
        for name in alarms.keys() - self._alarms:
            self.event("alarm", version=report.version, figure=name, text=alarms[name])
            self._say(f"alarm at step {report.version}: {alarms[name]}")
        self._alarms = set(alarms)

    def _record_drafting(self, stats: Sequence[EngineStats]) -> None:
        for text in self._drafting.changes(arm for found in stats for arm in found.speculation):
            self.event("drafting", text=text)
            self._say(text)

    def evaluation(self, steps_done: int, start: float, scores: Scores, *, beside: bool = False) -> None:
        """One `beside` training takes none of its time."""
        self.evaluations[steps_done] = msgspec.to_builtins(scores)
        if beside:
            lasted = time.time() - start
            self.event("evaluation", seconds=0.0, beside_seconds=lasted, step=steps_done, scores=scores)
        else:
            self.span("evaluation", start, step=steps_done, scores=scores)
            self._loop_started += time.time() - start
        self._progress.evaluation(steps_done, scores)
        self._trackers.evaluation(steps_done, self.evaluations[steps_done])

    def held_out_loss(self, steps_done: int, start: float, loss: float) -> None:
        """Of a supervised start."""
        self.span("held_out_loss", start, step=steps_done, loss=loss)
        self._loop_started += time.time() - start
        self._trackers.evaluation(steps_done, {"loss": loss})
        self._say(f"held-out loss after step {steps_done}: {loss:.4f}")

    def evaluation_left_out(self, steps_done: int, reason: str) -> None:
        self.event("evaluation_left_out", step=steps_done, reason=reason)
        self._say(escape(f"the evaluation after step {steps_done} is left out: {reason}"))

    def lost(self, engine: str, reason: str) -> None:
        """An engine died, and is brought back."""
        self.event("engine_lost", engine=engine, reason=reason)
        self._say(f"{engine} died and is started again; its completions continue on other engines")

    def moved(self, engine: str, samples: int) -> None:
        """So many samples of an engine that died or leaves go on at others."""
        self._moved[engine] += samples

    def resized(self, size: int, wanted: int, reason: str) -> None:
        """The elastic pool was given another target size."""
        self.event("pool_resized", size=size, wanted=wanted, reason=reason)
        self._say(f"{'more' if wanted > size else 'fewer'} engines, {size} -> {wanted}: {reason}")

    def left(self, engine: str, stats: EngineStats) -> None:
        """An engine leaves; what it generated stays in the count."""
        self._count(engine, stats)

    def restart(self, reason: str) -> None:
        """An actor died that the run cannot do without."""
        self.event("restart", reason=reason)
        self._say(f"{reason.splitlines()[0]}: the run starts again from its last checkpoint")

    def regenerated(self, samples: int) -> None:
        """These were in flight when the run was killed or an actor died: the only ones whose harness or environment is
        called a second time."""
        text = f"{samples} samples that were in flight are generated again"
        self.event("regenerated", samples=samples, text=text)
        self._say(text)

    def changed(self, overrides: Sequence[str]) -> None:
        """The run was resumed with other settings."""
        self.event("settings_changed", step=self._first_step, overrides=list(overrides))
        self._say(escape(f"from step {self._first_step + 1} on with {' '.join(overrides)}"))

    def damaged(self, checkpoints: Sequence[str]) -> None:
        """Checkpoints that were set aside, each with what is wrong with it and which is used instead."""
        for sentence in checkpoints:
            self.event("checkpoint_damaged", text=sentence)
            self._say(escape(sentence))

    def pruned(self, found: Pruning) -> None:
        if found.files:
            text = f"{len(found.files)} files of trajectories/ with {found.bytes} bytes, as buffer.keep says"
            self.event("pruned", text=text, files=found.files)

    def function_failed(self, failure: FunctionFailure) -> None:
        """The first failure of its kind; those after it are counted only."""
        fields = msgspec.to_builtins(failure)
        self.event("function_failed", text=f"{failure.function}: {failure.reason}: {failure.message}", **fields)
        line = f", in the line {failure.source}" if failure.source else ""
        self._say(
            escape(
                f"{failure.function}: {failure.reason}: {failure.message}{line}; the sample is dropped and counted, "
                f"others as well: asyncrl query {self._directory.path} failures"
            )
        )

    def fp8_left(self, reason: str) -> None:
        self.event("fp8_left", reason=reason)
        self._say(f"{reason}: the run starts again from its last checkpoint, without FP8")

    def drafter_lost(self, reason: str) -> None:
        self.event("drafter_lost", reason=reason)
        self._say("the drafter died; engines keep the last head, and the run goes on")

    def drafter_failed(self, problem: str) -> None:
        self.event("drafter_failed", problem=problem)
        self._say(f"the drafter: {problem}; engines keep the heads they have, and the run goes on")

    def drafter(self, version: int) -> None:
        self.event("drafter_published", version=version)

    def write_metrics(self) -> None:
        self.rows.write()
        self._written = time.time()

    def close(self) -> None:
        self.write_metrics()
        if lost := self._trackers.close():
            self.event("tracking_lost", records=lost)
        self._events.close()


def trackers(run: Run, directory: RunDirectory, say: Callable[[str], None], *, first_step: int) -> Trackers:
    """The trackers of a run, opened lazily: nothing is imported or started before the first metrics."""
    session = Session(
        name=run.name,
        project=run.project,
        directory=directory.path,
        config=msgspec.to_builtins(run),
        first_step=first_step,
        say=say,
    )
    known = TRACKERS | RAY_TRACKERS
    openers = {name: opener(known[name], session) for name in run.trackers}
    return Trackers(openers, lambda text: say(escape(text)))


def _trained(done: Sequence[Accumulated]) -> Row:
    """Figures of the samples that the step trained on."""
    rewards = [reward for part in done for reward in part.rewards]
    staleness = [age for part in done for age in part.staleness]
    lengths = [length for part in done for length in part.lengths]
    return {
        "reward": sum(rewards) / len(rewards),
        **reward_parts(parts for part in done for parts in part.parts),
        "staleness_mean": sum(staleness) / len(staleness),
        "staleness_max": max(staleness),
        "length_mean": sum(lengths) / len(lengths),
        "length_max": max(lengths),
        **agent_figures(part.played for part in done),
        "incomplete_groups": sum(part.incomplete_groups for part in done),
        "train_seconds": sum(part.seconds for part in done),
        "first_work": min(part.started for part in done),
        "first_wave_finished": max(part.first_wave_finished for part in done),
    }


def _judged(stats: JudgeStats | None) -> Row:
    """What the judge has cost so far; no column without one."""
    return {} if stats is None else {"judge": msgspec.structs.asdict(stats)}


async def _teaching(fleet: Fleet) -> Row:
    """What the teachers of a distillation have done so far, together."""
    stats = [msgspec.structs.asdict(await teacher.stats()) for teacher in fleet.teachers]
    return {f"teacher_{name}": sum(each[name] for each in stats) for name in (stats[0] if stats else ())}


def _engines(stats: Mapping[str, EngineStats], moved: Mapping[str, int]) -> Row:
    """A list for each figure, which is written faster than an object for each engine."""
    figures = {name: [getattr(found, name) for found in stats.values()] for name in ENGINE_FIGURES}
    return {"engine": list(stats), **figures, "moved": [moved.get(name, 0) for name in stats]}


def _drafting(stats: Sequence[EngineStats]) -> Row:
    arms = [arm for found in stats for arm in found.speculation]
    return {
        "drafts": sum(s.drafts for s in stats),
        "drafted_tokens": sum(s.drafted_tokens for s in stats),
        "accepted_tokens": sum(sum(s.accepted_by_position) for s in stats),
        "accepted_by_position": _added(s.accepted_by_position for s in stats),
        "speculation_net_gain": net_gain(arms),
        "speculation": [msgspec.structs.asdict(arm) for arm in arms],
    }


def _added(columns: Iterable[tuple[int, ...]]) -> list[int]:
    return [sum(column) for column in zip_longest(*columns, fillvalue=0)]
