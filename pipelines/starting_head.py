"""The head that a run begins with: the user's, the run's own from an earlier attempt, or a fresh one."""

from pathlib import Path

import msgspec

from asyncrl.config import Run
from asyncrl.drafting.settings import Eagle3Drafter, EagleDrafter
from asyncrl.rundir import RunDirectory


def prepare_head(run: Run, directory: RunDirectory, model_path: Path) -> Run:
    """The run with the path of a head that is there; it lies with the run, where its drafter saves the trained one."""
    drafter = run.drafter
    if not isinstance(drafter, EagleDrafter | Eagle3Drafter):
        return run
    from asyncrl.drafting.checkpoint import fresh_head, load_head, save_head  # torch, which a plan does without
    from asyncrl.models.config import read_config

    if not (directory.drafter / "config.json").is_file():
        config = read_config(model_path)
        head = load_head(drafter.path, config) if drafter.path else fresh_head(drafter, config, run.seed)
        save_head(head, directory.drafter)
    path = str(directory.drafter.resolve())
    return msgspec.structs.replace(run, drafter=msgspec.structs.replace(drafter, path=path))
