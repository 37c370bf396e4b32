"""Every pipeline by its name; a class of the user's by its location."""

from collections.abc import Callable
from importlib import import_module
from typing import Protocol

from asyncrl.config import Run
from asyncrl.errors import AsyncRLError, first_cause
from asyncrl.system.user_functions import calling, load_function, raised_at
from pipelines.blocks import Blocks

PIPELINES = {
    "async_grpo": "pipelines.async_grpo:AsyncGrpo",
    "distill": "pipelines.distill:Distill",
    "sft": "pipelines.sft:Sft",
}
"""As `module:Class`. Their names also stand in `asyncrl.config.run`."""
EXPECTED = "Class(blocks: Blocks) with a method `async def run(self) -> None`"


class Running(Protocol):
    """A pipeline of a run."""

    async def run(self) -> None: ...


def load_pipeline(run: Run) -> Callable[[Blocks], Running]:
    """ConfigError if it cannot be imported."""
    if run.pipeline not in PIPELINES:
        return load_function(run.pipeline, "pipeline")
    module, name = PIPELINES[run.pipeline].split(":")
    return getattr(import_module(module), name)


async def run_pipeline(blocks: Blocks) -> None:
    """An error in the user's class is told with its line."""
    location, pipeline = blocks.run.pipeline, load_pipeline(blocks.run)
    if location in PIPELINES:
        return await pipeline(blocks).run()
    try:
        await pipeline(blocks).run()
    except Exception as error:
        cause = first_cause(error)
        if isinstance(cause, AsyncRLError) or not raised_at(cause)[0]:
            raise
        with calling("pipeline", location, EXPECTED):
            raise cause from None
