"""`asyncrl drafter`: trains a draft head on what a run recorded, and exports one.

recorded trajectories -> one forward of the run's policy -> hidden states -> DrafterLearner -> RUN/drafter
"""

from collections import deque
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter

import msgspec
import torch
from safetensors.torch import save_file

from actors.drafter.actor import STATE
from asyncrl.buffer.reader import read_run
from asyncrl.config import Run
from asyncrl.config.drafter import DrafterTraining, Eagle3Drafter, EagleDrafter, HeadDrafter
from asyncrl.drafting.checkpoint import fresh_head, head_config, load_head, save_head
from asyncrl.drafting.heads import Kind
from asyncrl.drafting.learner import Acceptance, DrafterLearner
from asyncrl.drafting.reading import read_windows
from asyncrl.drafting.store import HiddenStates
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.models.checkpoint import load_model
from asyncrl.models.config import read_config
from asyncrl.system.run_directory import RunDirectory
from asyncrl.training.checkpoint_manifest import choose
from asyncrl.training.device import training_device
from asyncrl.types import Trajectory
from pipelines.compose import from_yaml

JUDGE_TOKENS = 8192
JUDGING_GROUPS = 4
"""Groups that are held out at least, about: the share of a short run would be none."""
LINES = 10
DRAFTERS: dict[Kind, HeadDrafter] = {"eagle": EagleDrafter(), "eagle3": Eagle3Drafter()}


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """The result, on completions that were not trained on."""

    before: Acceptance
    after: Acceptance
    seconds: float
    directory: Path


def train(path: Path, *, kind: Kind | None, steps: int, out: Path | None, policy: Path | None) -> Trained:
    """A fresh head for the run's newest policy, or for the checkpoint `policy`, in RUN/drafter or in `out`."""
    source = RunDirectory.open(path)
    run = from_yaml(source.config)
    drafter = _drafter(run, kind)
    torch.set_num_threads(run.trainer.threads)
    model, config = load_model(policy or _newest(source))
    device = training_device(run.trainer.device)
    model.to(device).requires_grad_(False)
    wide = head_config(drafter, config).read_width + config.hidden_size
    recorded = _recorded(source, tokens=drafter.training.max_bytes // (4 * wide))
    head = fresh_head(drafter, config, run.seed, _counts(recorded, config.vocabulary))
    states = _states(drafter.training, recorded, run.seed)
    states.add(read_windows(model, head.config, recorded, longest=drafter.training.window_tokens))
    learner = DrafterLearner(head, model.embed_tokens.weight, model.output_matrix, drafter.training, device)
    done = _learn(learner, states, drafter, steps, out or source.drafter)
    save_head(learner.head, done.directory)
    save_file(learner.state(), done.directory / STATE)  # a resumed run goes on from it
    return done


def export(path: Path, out: Path) -> Kind:
    """Write the run's head as a directory that vLLM loads, without what only training needs."""
    source = RunDirectory.open(path)
    if not (source.drafter / "config.json").is_file():
        raise ConfigError(f"{path} has no trained drafter: make one with `asyncrl drafter train {path}`")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"--out {out} exists already and is not empty: name a new directory, or remove it first")
    head = load_head(source.drafter, read_config(_newest(source)))
    save_head(head, out)
    return head.config.kind


def _drafter(run: Run, kind: Kind | None) -> HeadDrafter:
    """The run's own drafter, if it is of that kind, else one with default settings."""
    own = run.drafter.head
    if own is not None and kind in (None, own.architecture):
        return own
    return DRAFTERS[kind or "eagle3"]


def _newest(source: RunDirectory) -> Path:
    newest = choose(source.checkpoints).newest
    if newest is None:
        raise CheckpointError(f"{source.path} has no checkpoint yet: let it run on, or name a model with --checkpoint")
    return newest[1]


def _recorded(source: RunDirectory, tokens: int) -> list[Trajectory]:
    """The newest trajectories whose hidden states have room."""
    held: deque[Trajectory] = deque()
    used = 0
    for trajectory in read_run(source.trajectories) if source.trajectories.is_dir() else ():
        held.append(trajectory)
        used += sum(map(len, trajectory.segments))
        while used > tokens and len(held) > 1:
            used -= sum(map(len, held.popleft().segments))
    if not held:
        raise ConfigError(
            f"{source.path} recorded no trajectories to learn from: let it run on, or run it again with "
            f"buffer.durability=process"
        )
    return list(held)


def _counts(recorded: Iterable[Trajectory], vocabulary: int) -> torch.Tensor:
    counts_V = torch.zeros(vocabulary, dtype=torch.int64)
    for trajectory in recorded:
        counts_V += torch.from_numpy(trajectory.tokens).long().bincount(minlength=vocabulary)
    return counts_V


def _states(settings: DrafterTraining, recorded: Iterable[Trajectory], seed: int) -> HiddenStates:
    groups = len({trajectory.slot.group for trajectory in recorded})
    return HiddenStates(settings.max_bytes, max(settings.held_out, min(0.5, JUDGING_GROUPS / groups)), seed)


def _learn(learner: DrafterLearner, states: HiddenStates, drafter: HeadDrafter, steps: int, directory: Path) -> Trained:
    judges, began = states.judges(JUDGE_TOKENS), perf_counter()
    before = after = learner.evaluate(judges, drafter.tokens)
    for step in range(1, steps + 1):
        update = learner.update(states.batch(drafter.training.batch_tokens))
        if step % max(1, steps // LINES) == 0 or step == steps:
            after = learner.evaluate(judges, drafter.tokens)
            print(f"update {step}/{steps}  loss {update.loss:.4f}  acceptance length {after.length:.3f}", flush=True)
    return Trained(before=before, after=after, seconds=perf_counter() - began, directory=directory)
