"""Prompts of a `verifiers` environment. `Prompt.answer` holds all that its harness needs to play one of its tasks."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from asyncrl.config.task import VerifiersTask
from asyncrl.errors import ConfigError
from asyncrl.harnesses.verifiers import Question, environment_config, taskset
from asyncrl.system.optional import require
from asyncrl.tasks.base import Task
from asyncrl.tasks.python import Stream
from asyncrl.tasks.tables import Rows
from asyncrl.types import Prompt


def verifiers_task(settings: VerifiersTask, seed: int) -> Task:
    require("verifiers", extra="verifiers")
    source = f"task.environment={settings.environment}"
    try:
        config = environment_config(settings.environment, settings.args)
        tasks = taskset(config)
        first = list(islice(tasks, 1))
    except Exception as error:  # of the environment's own code
        raise ConfigError(
            f"{source} with task.args={settings.args} cannot be used ({type(error).__name__}: {error}); install the "
            "package of the environment, and compare task.args with its settings"
        ) from error
    if not first:
        raise ConfigError(f"{source} has no task; compare task.args={settings.args} with its settings")
    if not settings.allow_unsafe_exec:
        _check_runtimes(config)
    prompts = _prompts(settings, tasks)
    return Rows(list(prompts), settings.held_out, seed, source) if tasks.bounded else Stream(prompts, source)


def _prompts(settings: VerifiersTask, tasks: Any) -> Iterator[Prompt]:
    for task in tasks:
        data = task.data.model_dump(mode="json", exclude_none=True)
        yield Prompt(
            uid=f"{settings.environment}/{task.data.idx}",
            text=task.data.prompt_text or task.data.name or task.key,  # where a user opens the conversation
            answer=Question(settings.environment, settings.args, data).encoded(),
        )


def _check_runtimes(config: Any) -> None:
    """Refuse an agent whose program would run the model's commands on this machine."""
    load = require("verifiers.v1", extra="verifiers").load_harness
    for role, harness in config.agent_harnesses().items():
        if getattr(config, role).runtime.type == "subprocess" and load(harness).EXECUTES_CODE:
            raise ConfigError(
                f"task.args.{role}.harness.id={harness.id} runs the model's commands, and with "
                f"task.args.{role}.runtime.type=subprocess it does so as you; set docker, podman or apptainer, or "
                "task.allow_unsafe_exec=true where this machine holds nothing of value"
            )
