"""Train again from what a run recorded, without engines: the same settings must give the same weights.

recorded deliveries, in order -> Learner.accumulate -> Learner.step -> digest against the run's checkpoint
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file

from asyncrl.buffer.reader import read_deliveries, read_run
from asyncrl.config import Checkpoint, Run
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.models.checkpoint import WEIGHTS, save_model
from asyncrl.rundir import RunDirectory
from asyncrl.training import checkpoint
from asyncrl.training.learner import Learner
from asyncrl.training.report import StepReport
from asyncrl.types import Group, Trajectory
from asyncrl.weights.manifest import digest_tensors
from pipelines.compose import changed, from_yaml


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """Where a replay came to."""

    steps: int
    digest: str
    recorded: str
    """Digest of the run's own weights after as many steps."""

    @property
    def identical(self) -> bool:
        return self.digest == self.recorded


def replay(path: Path, overrides: Sequence[str], *, out: Path | None = None) -> Replayed:
    """Take the recorded steps up to the newest checkpoint, perhaps with another algorithm, correction or trainer."""
    directory = RunDirectory.open(path)
    recorded = from_yaml(directory.config)
    run = changed(recorded, overrides, allowed=("algorithm", "correction", "trainer"))
    saved = checkpoint.numbered(directory.checkpoints)
    if not saved:
        raise CheckpointError(f"{path} has no checkpoint yet: there is nothing that a replay could be compared with")
    steps, newest = saved[-1]
    learner = _learner(run, directory)
    for number, report in enumerate(_steps(learner, directory.trajectories, steps, run.rollout.group_size), start=1):
        print(_line(number, steps, report), flush=True)
    if out is not None:
        save_model(learner.model, out)
    return Replayed(
        steps=steps,
        digest=digest_tensors(sorted(learner.tensors())),
        recorded=digest_tensors(sorted(load_file(newest / WEIGHTS).items())),
    )


def _learner(run: Run, directory: RunDirectory) -> Learner:
    model = Path(run.model.path).expanduser() if isinstance(run.model, Checkpoint) else directory.model
    if not model.is_dir():
        raise ConfigError(f"the run started from {model}, which is not there any more; a replay starts from it too")
    torch.set_num_threads(run.trainer.threads)  # sums are taken in another order with other threads
    return Learner(model, run.trainer, run.algorithm, run.correction, temperature=run.rollout.temperature)


def _steps(learner: Learner, trajectories: Path, steps: int, group_size: int) -> Iterator[StepReport]:
    source = _Groups(read_run(trajectories), group_size)
    for step, deliveries in read_deliveries(trajectories).items():
        if step >= steps:
            return
        for groups in deliveries:
            learner.accumulate([source.take(number) for number in groups])
        yield learner.step()


class _Groups:
    """Whole groups out of a stream of samples; only those not yet asked for are held in memory."""

    def __init__(self, stored: Iterator[Trajectory], size: int) -> None:
        self._stored = stored
        self._size = size
        self._held: dict[int, list[Trajectory]] = {}

    def take(self, number: int) -> Group:
        """Read on until the group is whole, which it was before it was delivered."""
        while len(self._held.get(number, ())) < self._size:
            trajectory = next(self._stored, None)
            if trajectory is None:
                raise CheckpointError(f"samples of group {number} are not in the run's trajectories any more")
            self._held.setdefault(trajectory.slot.group, []).append(trajectory)
        members = sorted(self._held.pop(number), key=lambda trajectory: trajectory.slot.sample)
        return Group(id=number, trajectories=tuple(members))


def _line(number: int, steps: int, report: StepReport) -> str:
    figures: Mapping[str, float] = report.figures
    return (
        f"step {number}/{steps}  loss {report.loss:.4f}  grad norm {report.grad_norm:.3f}  ess {figures['ess']:.3f}  "
        f"mismatch {figures['mismatch_kl']:.5f}"
    )
