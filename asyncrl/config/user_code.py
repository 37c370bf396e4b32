"""Functions of the user's: the reward, the environment or agent, and stages between the reward and the buffer.

Each runs in processes of its own that can be killed; `Called` is what they have in common.
"""

from typing import TYPE_CHECKING, ClassVar, Literal

from asyncrl.config.base import AboveZero, Positive, Settings
from asyncrl.config.judge import Judge
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.config.run import Run


class Called(Settings, frozen=True):
    """A function of the user's, run in processes of its own that can be killed."""

    KIND: ClassVar[Literal["reward", "environment", "agent", "stage"]]

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

    @property
    def value(self) -> str:
        """Of that setting."""
        return self.function

    @property
    def expected(self) -> str:
        """How it is called."""
        return f"{self.function.rpartition(':')[2]}({self.ARGUMENTS})"


class Reward(Called, frozen=True):
    """A plain function, a model that judges, or both."""

    KIND = "reward"
    ARGUMENTS = "prompt: str, completion: str, answer: str"
    RETURNS = "a finite number, or a dict of numbers under names such as format"

    function: str = "asyncrl.tasks.chains:reward"
    """`package.module:function` or `path/to/file.py:function`, called as f(prompt, completion, answer); empty: only
    `judge` is asked."""
    judge: Judge = Judge()
    model: str = ""
    """A reward model for the function asyncrl.rewards.model:reward: a Hugging Face directory with a head of one
    number."""
    model_device: str = "cpu"
    """Where each worker computes it, such as `cuda:0`. That GPU is not taken from the cluster's: leave room on it."""
    timeout_s: AboveZero = 5.0
    allow_unsafe_exec: bool = False
    """Where programs cannot be contained, run the model's code all the same, as you and with all that you can do."""


MODEL_REWARD = "asyncrl.rewards.model:reward"


def check_reward(run: "Run") -> None:
    function, model = run.reward.function, run.reward.model
    if model and function != MODEL_REWARD:
        raise ConfigError(
            f"reward.model={model} is for reward.function={MODEL_REWARD} alone, and reward.function={function}: set it"
        )
    if function == MODEL_REWARD and not model:
        raise ConfigError(f"reward.function={MODEL_REWARD} needs reward.model, the directory of a reward model")


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


class Agent(Called, frozen=True):
    """A harness that samples over HTTP, with an OpenAI or Anthropic client, and ends with a result (docs/agents.md)."""

    KIND = "agent"
    ARGUMENTS = "prompt: str, answer: str, access: Access"
    RETURNS = "the result as a text, None for the model's last turn, a reward, or an Outcome of these"

    function: str = ""
    """`package.module:function` or `path/to/file.py:function`, called as f(prompt, answer, access); empty: none. Its
    messages are shown in the model's chat template, if it has one. `rollout.max_tokens` bounds all tokens of an episode
    after its first prompt."""
    command: tuple[str, ...] = ()
    """In place of a function: a program that is started for each episode, such as `[python, my_agent.py]`."""
    timeout_s: AboveZero = 600.0
    """For one episode."""
    concurrency: Positive = 128
    """Episodes at a time in one worker: tasks of an async function, else threads. Programs are counted in the same
    way."""
    history: Literal["keep", "template"] = "keep"
    """Earlier turns in later calls: `keep` the tokens that were sampled, or render them as the chat `template` does.
    Where that leaves reasoning out, each later call is a branch of its own."""
    tool_format: str = ""
    """How the model writes tool calls and reasoning; empty: found from its chat template."""

    @property
    def field(self) -> str:
        return "agent.command" if self.command else "agent.function"

    @property
    def value(self) -> str:
        return " ".join(self.command) or self.function

    @property
    def expected(self) -> str:
        if self.command:
            return "a program that reads a line of JSON (prompt, answer, url, key, ...) from stdin and prints a result"
        return super().expected

    @property
    def on(self) -> bool:
        return bool(self.function or self.command)


def check_agent(run: "Run") -> None:
    agent = run.agent
    if agent == Agent():
        return
    if not agent.on:
        raise ConfigError("agent.* is set and neither agent.function nor agent.command is: set one, or leave it out")
    if agent.function and agent.command:
        raise ConfigError("agent.function and agent.command are both set: an episode has one harness; leave one out")
    if run.environment.on:
        raise ConfigError(
            "agent.* and environment.function are both set: a harness has its own tools; leave the environment out"
        )
    if not run.engine.has_model:
        raise ConfigError(f"agent.* needs text, and engine={run.engine.kind} generates none; use engine=native or vllm")
    if (head := run.drafter.head) is not None and "rollout" in run.hidden_states_from:
        raise ConfigError(
            f"drafter.training.source={head.training.source} takes hidden states of whole completions, and an "
            "episode of a harness is many calls: set drafter.training.source=trainer"
        )
    if run.rollout.router_replay == "on":
        raise ConfigError(
            "rollout.router_replay=on replays the experts of one line of tokens, and an episode of a harness may have "
            "branches: set rollout.router_replay=auto, which is off with agent.*"
        )


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
