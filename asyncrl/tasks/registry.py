"""Every source of prompts, by its settings; each is imported only when chosen.

A new one is its settings in `asyncrl.config.task`, a file here with a class or function of them, and a line.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from asyncrl.config.task import (
    ChainsTask,
    CodeTask,
    DatasetTask,
    JsonlTask,
    MixTask,
    ParquetTask,
    PythonTask,
    ReasoningGymTask,
    TaskBase,
    VerifiersTask,
)
from asyncrl.tasks.base import Task

TASKS: dict[type[TaskBase], str] = {
    ChainsTask: "asyncrl.tasks.chains:Chains",
    JsonlTask: "asyncrl.tasks.tables:Jsonl",
    ParquetTask: "asyncrl.tasks.tables:Parquet",
    DatasetTask: "asyncrl.tasks.tables:Dataset",
    PythonTask: "asyncrl.tasks.python:python_task",
    CodeTask: "asyncrl.tasks.code:Code",
    ReasoningGymTask: "asyncrl.tasks.reasoning_gym:ReasoningGym",
    VerifiersTask: "asyncrl.tasks.verifiers:verifiers_task",
    MixTask: "asyncrl.tasks.mix:Mix",
}
"""As `module:name`. Some need optional packages."""


def make_task(settings: TaskBase, seed: int) -> Task:
    module, name = TASKS[type(settings)].split(":")
    build: Callable[[Any, int], Task] = getattr(import_module(module), name)
    return build(settings, seed)
