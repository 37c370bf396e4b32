"""Sources of prompts by their settings. A new one is a file here, its settings in asyncrl.config.task, and a line."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from asyncrl.config.task import (
    ChainsTask,
    CodeTask,
    DatasetTask,
    JsonlTask,
    ParquetTask,
    PythonTask,
    ReasoningGymTask,
    TaskSettings,
)
from asyncrl.tasks.base import Task

TASKS: dict[type[TaskSettings], str] = {
    ChainsTask: "asyncrl.tasks.chains:Chains",
    JsonlTask: "asyncrl.tasks.tables:Jsonl",
    ParquetTask: "asyncrl.tasks.tables:Parquet",
    DatasetTask: "asyncrl.tasks.tables:Dataset",
    PythonTask: "asyncrl.tasks.python:python_task",
    CodeTask: "asyncrl.tasks.code:Code",
    ReasoningGymTask: "asyncrl.tasks.reasoning_gym:ReasoningGym",
}
"""Imported when chosen: some need optional packages."""


def make_task(settings: TaskSettings, seed: int) -> Task:
    module, name = TASKS[type(settings)].split(":")
    build: Callable[[Any, int], Task] = getattr(import_module(module), name)
    return build(settings, seed)
