"""The settings that each step of a run was trained with: those of `config.yaml`, and those that a resumed run replaced.

    earlier_settings/until-40.yaml    steps 1 to 40
    earlier_settings/until-60.yaml    steps 41 to 60
    config.yaml                       the steps after them

A run that is resumed after 60 steps with other settings leaves such a file behind, so that `asyncrl replay` can take
every step as it was taken.
"""

from pathlib import Path

from asyncrl.config import Run
from asyncrl.system.run_directory import RunDirectory, replace
from pipelines.compose import from_yaml

STEM = "until-"


def keep(directory: RunDirectory, steps: int, *, changes: bool) -> None:
    """Before a run continues after `steps` optimizer steps, with or without `changes` of its settings. What was kept of
    later steps is forgotten: they are taken again."""
    kept = _kept(directory)
    later = [until for until in kept if until > steps]
    if steps and steps not in kept and (changes or later):
        directory.earlier_settings.mkdir(mode=0o700, exist_ok=True)
        source = kept[later[0]] if later else directory.config
        replace(directory.earlier_settings / f"{STEM}{steps}.yaml", source.read_bytes())
    for until in later:
        kept[until].unlink()


def by_step(directory: RunDirectory) -> list[tuple[int, Run]]:
    """The settings of the run, each with the first step, from 0, that they hold for."""
    found: list[tuple[int, Run]] = []
    start = 0
    for until, path in _kept(directory).items():
        found.append((start, from_yaml(path)))
        start = until
    return [*found, (start, from_yaml(directory.config))]


def _kept(directory: RunDirectory) -> dict[int, Path]:
    """By the number of steps that they hold for, in order."""
    paths = directory.earlier_settings.glob(f"{STEM}*.yaml")
    return dict(sorted((int(path.stem.removeprefix(STEM)), path) for path in paths))
