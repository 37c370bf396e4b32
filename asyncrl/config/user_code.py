"""Functions of the user's: the reward, the environment, and stages between the reward and the buffer.

Each runs in processes of its own that can be killed; `Called` is what they have in common.
"""

from typing import TYPE_CHECKING, ClassVar, Literal

from asyncrl.config.base import AboveZero, Positive, Settings
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.config.run import Run


class Called(Settings, frozen=True):
    """A function of the user's, run in processes of its own that can be killed."""

    KIND: ClassVar[Literal["reward", "environment", "stage"]]

    ARGUMENTS: ClassVar[str]
    """What it is called with, as in a signature."""
    RETURNS: ClassVar[str]
    """What it has to return, for whoever reads that it did not."""

    function: str
    timeout_s: AboveZero = 30.0
    """For one call; what takes longer is killed, and its sample dropped and counted."""
    workers: Positive = 1

    @property
    def field(self) -> str:
        """The setting that names the function."""
        return f"{self.KIND}.function"


class Reward(Called, frozen=True):
    """The judge: a plain function."""

    KIND = "reward"
    ARGUMENTS = "prompt: str, completion: str, answer: str"
    RETURNS = "a finite number, or a dict of numbers under names such as format"

    function: str = "asyncrl.tasks.chains:reward"
    """`package.module:function` or `path/to/file.py:function`, called as f(prompt, completion, answer)."""
    timeout_s: AboveZero = 5.0
    allow_unsafe_exec: bool = False
    """Where programs cannot be contained, run the model's code all the same, as you and with all that you can do."""


class Environment(Called, frozen=True):
    """Tools, games, users: whatever replies to the model, turn by turn. Its text is never trained on."""

    KIND = "environment"
    ARGUMENTS = "prompt: str, turns: list[str], answer: str"
    RETURNS = "the text to give to the model, or None where the conversation ends"

    function: str = ""
    """`package.module:function` or `path/to/file.py:function`, called as f(prompt, turns, answer); empty: none."""
    max_turns: Positive = 8
    """Of the model. `rollout.max_tokens` bounds all turns together, the environment's included."""

    @property
    def on(self) -> bool:
        return bool(self.function)


def check_environment(run: "Run") -> None:
    if run.environment == Environment():
        return
    if not run.environment.on:
        raise ConfigError("environment.* is set and environment.function is not: name the function, or leave it out")
    if not run.engine.has_model:
        raise ConfigError(
            f"environment.function={run.environment.function} needs text, and engine={run.engine.kind} generates none; "
            "use engine=native or vllm"
        )
    if run.environment.max_turns == 1:
        raise ConfigError("environment.max_turns=1 ends every sample before the environment is called; set 2 or more")


class Stage(Called, frozen=True):
    """A filter or a judge."""

    KIND = "stage"
    ARGUMENTS = "samples: list[Sample]"
    RETURNS = "a list with one Sample or Drop(reason) for each sample, in the same order"

    function: str
    """`package.module:function` or `path/to/file.py:function`, called as f(samples: list[Sample])."""

    @property
    def field(self) -> str:
        return "stages"


Stages = tuple[Stage | str, ...]
"""A plain text is the function of a stage with defaults."""


def stages(given: Stages) -> list[Stage]:
    return [Stage(function=each) if isinstance(each, str) else each for each in given]
