"""A run in a few lines of Python, in a script or in a notebook.

    result = Pipeline(model="models/smollm2", prompts="sums.jsonl", reward=reward, steps=50).run()

Functions are given as they are. One that stands in a file is called in processes of its own, like one that a config
names; a lambda, or a function of a notebook, is called in this process, in a thread.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast, get_args

import msgspec

from asyncrl.config import Checkpoint, Reward, Run, WarmStart, load
from asyncrl.config.algorithm import Algorithm
from asyncrl.config.errors import did_you_mean
from asyncrl.config.task import (
    ChainsTask,
    DatasetTask,
    JsonlTask,
    ParquetTask,
    PythonTask,
    ReasoningGymTask,
    TaskSettings,
)
from asyncrl.config.user_code import Agent, Environment, Stage
from asyncrl.engines.registry import engine_for
from asyncrl.errors import ConfigError
from asyncrl.system.user_functions import keep_here, loaded_file, name_of
from pipelines.recording.result import Result
from pipelines.supervision.thread_runner import in_a_loop, run_in_thread

Function = Callable[..., Any]
Part = msgspec.Struct | dict[str, Any]
"""Settings of one part, as their struct or as a dict of what differs from its defaults."""
REASONING_GYM = "reasoning_gym:"


class RunSettings(TypedDict, total=False):
    """Everything else that `asyncrl.config.Run` has."""

    root: str
    seed: int
    steps: int
    max_staleness: int
    cluster: str
    engine: Part
    staleness: Part
    correction: Part
    drafter: Part
    rollout: Part
    elastic: Part
    concurrency: Part
    placement: Part
    flow: Part
    trainer: Part
    sentinel: Part
    weights: Part
    recovery: Part
    buffer: Part
    checkpoint: Part
    evaluation: Part
    trackers: tuple[str, ...]
    project: str


class Pipeline:
    """A model, its prompts and the reward of completions. Runs in this process, unless `cluster` says otherwise."""

    def __init__(
        self,
        *,
        model: str | Path | Checkpoint | WarmStart,
        prompts: str | Path | TaskSettings | Function | Iterable[Any],
        reward: Function | str | Reward | None = None,
        environment: Function | str | Environment | None = None,
        agent: Function | str | Agent | None = None,
        stages: Sequence[Function | str | Stage] = (),
        algorithm: str | Algorithm | Function = "grpo",
        name: str = "",
        **settings: Unpack[RunSettings],
    ) -> None:
        """`prompts`: a .jsonl or .parquet file, a directory, a dataset of the Hugging Face hub, `reasoning_gym:NAME`,
        or anything to iterate over that gives texts, (text, reference) pairs or {prompt, answer} mappings. Without a
        `name` the next free `pipeline-N` is taken."""
        self._name = name or _free_name(Path(settings.get("root", "runs")))
        task = self._task(prompts)
        given = {key: msgspec.to_builtins(value) for key, value in settings.items()}
        source = msgspec.to_builtins(_model(model))
        chosen = engine_for({"model": source, **given, "engine": {}})
        raw: dict[str, Any] = {"cluster": "inprocess", "engine": chosen.settings, **given}
        raw |= {
            "name": self._name,
            "model": source,
            "task": msgspec.to_builtins(task),
            "reward": self._called("reward", (task.judge or Reward().function) if reward is None else reward),
            "algorithm": self._algorithm(algorithm),
            "stages": [self._called(f"stages/{number}", stage) for number, stage in enumerate(stages)],
        }
        if environment is not None:
            raw["environment"] = self._called("environment", environment)
        if agent is not None or task.harness:
            raw["agent"] = self._called("agent", task.harness if agent is None else agent)
        self.config: Run = load(raw)
        """Every setting, checked."""

    @property
    def directory(self) -> Path:
        return Path(self.config.root) / self.config.name

    def plan(self) -> None:
        """Print who would run, and what one step is made of; raise ConfigError if something stands in the way."""
        from rich.console import Console

        from pipelines.plan.plan import preflight
        from pipelines.plan.render import show
        from pipelines.plan.trial import reward_trial

        console = Console(highlight=False, markup=False)
        show(self.config, console)
        preflight(self.config)
        for line in reward_trial(self.config):
            console.print(line, soft_wrap=True)

    def run(self) -> Result:
        """Train to the end."""
        from pipelines.train import train

        return self._execute(lambda: train(self.config))

    def resume(self, *overrides: str) -> Result:
        """Continue a run of this name that was stopped or killed, with the settings that it was started with, but for
        the `overrides`, such as "trainer.lr=1e-6"."""
        from pipelines.train import resume

        return self._execute(lambda: resume(self.directory, overrides))

    def _execute(self, work: Callable[[], int]) -> Result:
        if (file := loaded_file()) is not None:
            raise ConfigError(
                f"{file} starts a run while it is only imported for a function of it: put the start under "
                '`if __name__ == "__main__":`'
            )
        if in_a_loop():
            run_in_thread(work)
        else:
            work()
        return Result(self.directory)

    def _location(self, field: str, function: Function) -> str:
        return name_of(function) or keep_here(function, f"{self._name}/{field}")

    def _called(self, field: str, given: Function | str | msgspec.Struct) -> Any:
        if isinstance(given, msgspec.Struct):
            return msgspec.to_builtins(given)
        return {"function": given if isinstance(given, str) else self._location(field, given)}

    def _algorithm(self, given: str | Algorithm | Function) -> dict[str, Any]:
        if isinstance(given, msgspec.Struct):
            return msgspec.to_builtins(given)
        if not isinstance(given, str):
            return {"type": "custom", "function": self._location("algorithm", given)}
        known = [str(member.__struct_config__.tag) for member in get_args(Algorithm)]
        if given not in known:
            raise ConfigError(f"algorithm={given!r} does not exist: {did_you_mean(given, known)}")
        return {"type": given}

    def _task(self, given: str | Path | TaskSettings | Function | Iterable[Any]) -> TaskSettings:
        if isinstance(given, str | Path):
            return _source(str(given))
        if isinstance(given, msgspec.Struct):
            return cast(TaskSettings, given)
        if callable(given):
            return PythonTask(function=self._location("prompts", given))
        return PythonTask(function=keep_here(lambda: given, f"{self._name}/prompts"))


def _source(text: str) -> TaskSettings:
    path = Path(text).expanduser()
    if text == "chains":
        return ChainsTask()
    if text.startswith(REASONING_GYM):
        return ReasoningGymTask(dataset=text.removeprefix(REASONING_GYM))
    if path.suffix in (".jsonl", ".json"):
        return JsonlTask(path=text)
    if path.suffix == ".parquet" or (path.is_dir() and any(path.rglob("*.parquet"))):
        return ParquetTask(path=text)
    return DatasetTask(name=text)


def _model(given: str | Path | Checkpoint | WarmStart) -> Checkpoint | WarmStart:
    return Checkpoint(path=str(given)) if isinstance(given, str | Path) else given


def _free_name(root: Path) -> str:
    number = 1
    while (root / f"pipeline-{number}").exists():
        number += 1
    return f"pipeline-{number}"
