"""What functions of the user's have in common, and the settings of the judge."""

from typing import ClassVar, Literal

from asyncrl.settings import AboveZero, Positive, Settings


class Called(Settings, frozen=True):
    """A function of the user's, run in processes of its own that can be killed."""

    KIND: ClassVar[Literal["reward", "environment", "stage"]]

    function: str
    timeout_s: AboveZero = 30.0
    """For one call; what takes longer is killed, and its sample dropped and counted."""
    workers: Positive = 1


class Reward(Called, frozen=True):
    """The judge: a plain function."""

    KIND = "reward"

    function: str = "asyncrl.tasks.chains:reward"
    """`package.module:function` or `path/to/file.py:function`, called as f(prompt, completion, answer)."""
    timeout_s: AboveZero = 5.0
    allow_unsafe_exec: bool = False
    """Where programs cannot be contained, run the model's code all the same, as you and with all that you can do."""
