"""Trains again from what a run recorded, without engines: the same settings must give the same weights.

recorded deliveries, in order -> Learner.accumulate -> Learner.step -> digest against the run's checkpoint
                                                                    -> a directory that `compare` reads like a run
"""

import asyncio
import io
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from actors.buffer import BufferActor
from actors.gateway.actor import GatewayActor
from actors.reward import RewardActor
from actors.rollout.actor import RolloutActor
from asyncrl.buffer.reader import read_deliveries, read_failures, read_run
from asyncrl.buffer.retention import read_pruned
from asyncrl.config import Run
from asyncrl.data.episodes import Played, agent_figures, played
from asyncrl.data.reward_parts import reward_parts
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.models.checkpoint import save_model
from asyncrl.system.run_directory import RunDirectory, replace
from asyncrl.tasks.registry import make_task
from asyncrl.training import checkpoint
from asyncrl.training.checkpoint_manifest import TrainingManifest, choose
from asyncrl.training.learner import Learner
from asyncrl.training.report import StepReport
from asyncrl.types import Group, Trajectory
from asyncrl.user_code.pool import check_function
from asyncrl.weights.manifest import digest_tensors
from pipelines.compose import changed, to_yaml
from pipelines.evaluate import Scores, evaluate, suite_rewards
from pipelines.recording import earlier_settings

Row = dict[str, Any]


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a replay."""

    steps: int
    digest: str
    recorded: str
    """Digest of the run's own weights after as many steps."""
    scores: Scores | None = None
    """Of the replayed weights on the run's held-out prompts, if requested."""
    ranks: int = 1
    """Of the run; a replay has one, which takes sums in another order than several."""

    @property
    def identical(self) -> bool:
        return self.digest == self.recorded


def replay(path: Path, overrides: Sequence[str], *, out: Path | None = None, held_out: bool = False) -> Replayed:
    """Take the recorded steps up to the newest checkpoint, perhaps with another algorithm, correction or trainer.

    With `out`, that directory is filled like a run's: config.yaml, metrics.parquet, summary.json and model/.
    """
    source = RunDirectory.open(path)
    allowed = ("algorithm", "correction", "trainer", "distill")
    settings = {first: changed(run, overrides, allowed=allowed) for first, run in earlier_settings.by_step(source)}
    run = settings[max(settings)]
    chosen = choose(source.checkpoints)
    for sentence in chosen.sentences:
        print(sentence, file=sys.stderr)
    if chosen.newest is None:
        raise CheckpointError(f"{path} has no sound checkpoint: there is nothing that a replay could be compared with")
    if pruned := read_pruned(source.trajectories):
        raise ConfigError(
            f"{path} cannot be replayed: {pruned} (buffer.keep={run.buffer.keep}), and a replay takes every step from "
            "the first; record with buffer.keep=all to replay a run"
        )
    if held_out:
        _check_held_out(run)
    start = _start(run, source)
    with TemporaryDirectory() as scratch:
        target = _directory(out) if out else RunDirectory(Path(scratch))
        done, rows = _train(settings, source, start, target.model, chosen.newest)
        _record(target, run, rows)
        _write_summary(target, source, done, rows)  # before the evaluation, whose failure must not cost the training
        if held_out:
            scores = asyncio.run(_score(run, target.model, Path(scratch) / "buffer"))
            done = msgspec.structs.replace(done, scores=scores)
            _write_summary(target, source, done, rows)
    return done


def _check_held_out(run: Run) -> None:
    if not run.evaluation.prompts:
        raise ConfigError("evaluation.prompts=0: the run has no held-out prompts to evaluate; leave --evaluate out")
    functions = [each for each in (run.reward, run.agent) if each.function]
    for called in (*functions, *([run.agent] if run.agent.command else [])):
        check_function(called)


def _start(run: Run, source: RunDirectory) -> Path:
    """The weights that the run began with."""
    model = run.model.directory or source.model
    if not model.is_dir():
        raise ConfigError(f"the run started from {model}, which is not there any more; a replay starts from it too")
    return model


def _directory(out: Path) -> RunDirectory:
    """A directory that is new or empty."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"--out {out} exists already and is not empty: name a new directory, or remove it first")
    out.mkdir(parents=True, exist_ok=True, mode=0o700)
    return RunDirectory(out)


def _train(
    settings: Mapping[int, Run], source: RunDirectory, start: Path, model: Path, newest: tuple[int, Path]
) -> tuple[Replayed, list[Row]]:
    """Take the steps, with the settings from each first step on, and save the weights under `model`, with the tokenizer
    of the start."""
    steps, recorded = newest
    run = settings[0]
    torch.set_num_threads(run.trainer.threads)  # sums are taken in another order with other threads
    learner = Learner(start, run)
    rows: list[Row] = []
    groups = _Groups(read_run(source.trajectories), run.rollout.group_size, read_failures(source.trajectories))
    for step, deliveries in read_deliveries(source.trajectories).items():
        if step >= steps:
            break
        if step and step in settings:
            learner = _resumed(learner, start, settings[step])
        rows.append(_step(learner, step, [[groups.take(number) for number in numbers] for numbers in deliveries]))
        print(_line(steps, rows[-1]), flush=True)
    save_model(learner.model, model, learner.tensors())
    for name in checkpoint.KEPT_BESIDE_WEIGHTS:
        if (start / name).is_file():
            shutil.copyfile(start / name, model / name)
    done = Replayed(
        steps=steps,
        digest=digest_tensors(sorted(learner.tensors())),
        ranks=run.trainer.ranks,
        recorded=digest_tensors(sorted(checkpoint.weights(recorded).items())),
    )
    return done, rows


def _resumed(learner: Learner, start: Path, run: Run) -> Learner:
    """As the run itself was resumed with these settings."""
    manifest = TrainingManifest(step=learner.version, samples_trained=0, consumed=())
    with TemporaryDirectory() as scratch:
        saved = checkpoint.save(learner, Path(scratch), manifest, model_path=start, keep=1)
        found = Learner(start, run)
        checkpoint.restore(found, saved)
    return found


def _step(learner: Learner, step: int, deliveries: Sequence[Sequence[Group]]) -> Row:
    trained: list[Trajectory] = []
    parts: list[Played] = []
    for groups in deliveries:
        learner.accumulate(groups)
        delivered = [trajectory for group in groups for trajectory in group.trajectories]
        parts.append(played(delivered))
        trained += delivered
    ages = [max(0, learner.version - trajectory.oldest_version) for trajectory in trained]
    return _row(step, learner.step(), trained, parts, ages)


def _row(
    step: int, report: StepReport, trained: Sequence[Trajectory], parts: Sequence[Played], ages: Sequence[int]
) -> Row:
    """What a run's own metrics hold, as far as it depends on the data and the training alone."""
    lengths = [trajectory.sampled_tokens for trajectory in trained]
    return {
        "step": step,
        "version": report.version,
        "samples": report.samples,
        "tokens": report.tokens,
        "reward": sum(trajectory.reward for trajectory in trained) / len(trained),
        **reward_parts(trajectory.parts for trajectory in trained),
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "skipped": report.skipped,
        **report.figures,
        "staleness_mean": sum(ages) / len(ages),
        "staleness_max": max(ages),
        "length_mean": sum(lengths) / len(lengths),
        "length_max": max(lengths),
        **agent_figures(parts),
    }


class _Groups:
    """Whole groups from a stream of samples; only those not yet taken are held in memory."""

    def __init__(self, stored: Iterator[Trajectory], size: int, failures: Mapping[int, int]) -> None:
        """`failures`: samples that groups were trained on without."""
        self._stored, self._size, self._failures = stored, size, failures
        self._held: dict[int, list[Trajectory]] = {}

    def take(self, number: int) -> Group:
        """Read on until the group is whole, which it was before it was delivered."""
        while len(self._held.get(number, ())) < self._size - self._failures.get(number, 0):
            trajectory = next(self._stored, None)
            if trajectory is None:
                raise CheckpointError(f"samples of group {number} are not in the run's trajectories any more")
            self._held.setdefault(trajectory.slot.group, []).append(trajectory)
        members = sorted(self._held.pop(number), key=lambda trajectory: trajectory.slot.sample)
        return Group(id=number, trajectories=tuple(members))


def _line(steps: int, row: Row) -> str:
    return (
        f"step {row['step'] + 1}/{steps}  loss {row['loss']:.4f}  grad norm {row['grad_norm']:.3f}  "
        f"ess {row['ess']:.3f}  mismatch {row['mismatch_kl']:.5f}{'  skipped' if row['skipped'] else ''}"
    )


async def _score(run: Run, model: Path, buffer: Path) -> Scores | None:
    """Held-out scores as the run's own engines would give them, from one such engine in this process."""
    reward = RewardActor(run.reward, run.environment, suites=suite_rewards(run))
    store = BufferActor(run, buffer)  # a rollout actor has one; nothing of an evaluation enters it
    here = msgspec.structs.replace(run, cluster="inprocess")  # the gateway needs no address in a cluster
    gateway = GatewayActor(here, model) if run.agent.on else None
    rollout = RolloutActor(run, model, "held-out", store, reward, gateway=gateway)
    asked = [rollout, *([gateway] if gateway is not None else []), reward]
    try:
        await asyncio.gather(*(each.start() for each in asked))
        return await evaluate(run, [rollout], make_task(run.task, run.seed))
    finally:
        for each in (*asked, store):
            await each.close()


def _record(target: RunDirectory, run: Run, rows: Sequence[Row]) -> None:
    replace(target.config, to_yaml(run).encode())
    names = dict.fromkeys(name for row in rows for name in row)  # a figure may be missing from the first steps
    sink = io.BytesIO()
    pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), sink)
    replace(target.metrics, sink.getvalue())


def _write_summary(target: RunDirectory, source: RunDirectory, done: Replayed, rows: Sequence[Row]) -> None:
    """The keys of a run's summary that a replay has too, and where it comes from."""
    samples = sum(row["samples"] for row in rows)
    summary = {
        "status": "ok",
        "kind": "replay",
        "replay_of": str(source.path.resolve()),
        "digest": done.digest,
        "recorded_digest": done.recorded,
        "identical": done.identical,
        "steps": done.steps,
        "samples_trained": samples,
        "steps_skipped": sum(row["skipped"] for row in rows),
        **_means(rows),
        "reward_first": rows[0]["reward"],
        "reward_last": rows[-1]["reward"],
        "staleness_mean": sum(row["staleness_mean"] * row["samples"] for row in rows) / samples,
        "staleness_max": max(row["staleness_max"] for row in rows),
        **_evaluations(source, done),
    }
    replace(target.summary, msgspec.json.format(msgspec.json.encode(summary)) + b"\n")


def _means(rows: Sequence[Row]) -> dict[str, float]:
    """Over the steps that have the figure; counts and flags are no figures."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if isinstance(value, float):
                values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def _evaluations(source: RunDirectory, done: Replayed) -> Row:
    """The run's own scores before its first step, and those of the replayed weights."""
    recorded: Row = source.read_summary() or {}
    first: Row | None = (recorded.get("evaluations") or {}).get("0")
    last: Row | None = msgspec.to_builtins(done.scores)
    both = {"0": first, str(done.steps): last}
    return {
        "eval_first": first and first["sampled"],
        "eval_last": last and last["sampled"],
        "eval_first_greedy": first and first["greedy"],
        "eval_last_greedy": last and last["greedy"],
        "evaluations": {step: scores for step, scores in both.items() if scores} or None,
    }
