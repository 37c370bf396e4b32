"""The end of the prompts is a message, not an absence."""

from asyncrl.config import Run
from asyncrl.errors import EndOfDataError
from asyncrl.tasks.base import Split, Task
from asyncrl.types import Prompt


class Announced:
    """A task that says so when it has no more prompts, where it was meant to be endless."""

    def __init__(self, task: Task, run: Run) -> None:
        self._task = task
        self._run = run

    def prompt(self, split: Split, index: int) -> Prompt:
        try:
            return self._task.prompt(split, index)
        except (StopIteration, IndexError, KeyError) as end:
            steps, groups = self._run.steps, self._run.flow.groups_per_step
            raise EndOfDataError(
                f"the prompts have ended: the task has no {split} prompt {index} ({type(end).__name__}: {end}), and "
                f"steps={steps} of {groups} groups take {steps * groups} at least; let it begin again from the first, "
                "or lower steps"
            ) from None
