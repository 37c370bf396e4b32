"""An environment: a function of the user's that answers the model, turn by turn."""

from typing import TYPE_CHECKING

from asyncrl.engines.settings import FakeEngine
from asyncrl.errors import ConfigError
from asyncrl.rewards.settings import Called
from asyncrl.settings import Positive

if TYPE_CHECKING:
    from asyncrl.config import Run


class Environment(Called, frozen=True):
    """Tools, games, users: whatever speaks between two turns of the model. What it says is given, never learned."""

    KIND = "environment"

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
    if isinstance(run.engine, FakeEngine):
        raise ConfigError("environment.function has nothing to answer with engine=fake, which writes no text")
    if run.environment.max_turns == 1:
        raise ConfigError("environment.max_turns=1 ends every answer before the environment is asked; set 2 or more")
