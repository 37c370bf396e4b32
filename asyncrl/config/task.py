"""Where prompts come from, and what the rest of the code asks about a task.

A new one is a struct here, its name in `TaskSettings`, and a line in `asyncrl.tasks.registry`.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from asyncrl.config.base import AboveZero, Chosen, Natural, NonNegative, Positive, Settings
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.config.run import Run

HeldOut = Annotated[float, Meta(ge=0, le=1)]
"""1 is for a suite of `evaluation.suites`, of which nothing is trained on."""
KILL_S = 5.0
"""For making a sandbox and ending it, beside the program's own time."""


class TaskBase(Chosen, frozen=True):
    """What the rest of the code asks about a task."""

    judge: ClassVar[str] = ""
    """The reward function that it comes with, where the default reward cannot judge its completions."""
    harness: ClassVar[str] = ""
    """The agent function that it comes with, where only that one can play its episodes."""

    @property
    def worked_examples(self) -> "ChainsTask | None":
        """Settings that a warm start can write worked examples from; None: it cannot."""
        return None

    @property
    def weights(self) -> Mapping[str, float]:
        """Of the sources that it mixes, in their order; one that mixes none is its only source."""
        return {self.kind: 1.0}

    def check(self, run: "Run") -> None:
        """Refuse a reward that would call right completions wrong, and other settings that do not go with the task."""
        if self.judge and run.reward.function.startswith("asyncrl.tasks.chains:"):
            raise ConfigError(
                f"reward.function={run.reward.function} cannot judge task={self.kind}; set reward.function={self.judge}"
            )
        if self.harness and run.agent.function != self.harness:
            raise ConfigError(
                f"task={self.kind} is played by a harness of its own, and agent.function={run.agent.function!r}; set "
                f"agent.function={self.harness}"
            )


class ChainsTask(TaskBase, frozen=True, tag="chains"):
    """Chains of small additions with labels; sizes are drawn long-tailed."""

    median_size: Annotated[int, Meta(ge=2, le=25)] = 3
    """Number of operations of the middle problem."""
    max_size: Annotated[int, Meta(ge=2, le=25)] = 16
    """There is one letter for each label, and the first is the start's."""
    size_spread: NonNegative = 0.7
    """Spread of the log-normal size distribution."""

    def __post_init__(self) -> None:
        if self.median_size > self.max_size:
            raise ValueError(f"median_size={self.median_size} is more than max_size={self.max_size}")

    @property
    def worked_examples(self) -> "ChainsTask":
        return self


class Columns(TaskBase, frozen=True):
    """Which columns of a table are what."""

    prompt: str = "prompt"
    """A text, or a chat as a list of {role, content} that ends with the user."""
    answer: str = ""
    """Column of the reference, which the reward gets as `answer`; empty: `answer`, if there is such a column."""
    held_out: HeldOut = 0.05
    """Share of the rows kept for evaluation."""

    @property
    def answer_column(self) -> str:
        return self.answer or "answer"


class JsonlTask(Columns, frozen=True, kw_only=True, tag="jsonl"):
    """Prompts from a JSON-lines file."""

    path: str


class ParquetTask(Columns, frozen=True, kw_only=True, tag="parquet"):
    """Prompts from a Parquet file, or from all of a directory."""

    path: str


class DatasetTask(Columns, frozen=True, kw_only=True, tag="dataset"):
    """Prompts from a Hugging Face dataset; needs the extra `datasets`."""

    name: str
    """One of the hub's, or a directory that `save_to_disk` wrote."""
    config: str = ""
    """Which one of several under the same name."""
    split: str = "train"


class PythonTask(TaskBase, frozen=True, tag="python"):
    """Prompts from a function of your own."""

    function: str
    """`package.module:function` or `path/to/file.py:function`, called without arguments: returns an iterable of texts,
    (text, reference) pairs, {prompt, answer} mappings or Prompts."""
    held_out: HeldOut = 0.05
    """Share kept for evaluation; of what has no length one text in eight is kept."""


class Limits(Settings, frozen=True):
    """What one program may use. Memory and time are of each process; the wall clock and the disk are of all of them."""

    wall_s: AboveZero = 10.0
    """For all inputs of a program together; then everything in the sandbox is killed."""
    cpu_s: Positive = 2
    """Seconds of CPU for each input."""
    memory_bytes: Positive = 512 << 20
    """Address space."""
    processes: Positive = 8
    """At a time, threads included."""
    output_bytes: Positive = 1 << 20
    """What is kept of each input's output; also the size of the largest file it can write."""
    disk_bytes: Positive = 64 << 20
    """All files together; they are in memory."""


class CodeTask(TaskBase, frozen=True, tag="code"):
    """Programs to write, from a JSON-lines file with the fields `prompt` and `tests`; judged by running them."""

    judge = "asyncrl.rewards.code:reward"

    path: str
    held_out: HeldOut = 0.05
    """Share of the file kept for evaluation."""
    limits: Limits = Limits()
    """What the program of one completion may use."""

    def check(self, run: "Run") -> None:
        """Also a reward that would be killed over programs that are merely slow."""
        super().check(run)
        least = self.limits.wall_s + KILL_S
        if run.reward.timeout_s < least:
            raise ConfigError(
                f"reward.timeout_s={run.reward.timeout_s:g} would drop programs that run into task.limits.wall_s="
                f"{self.limits.wall_s:g} instead of giving them 0; set reward.timeout_s={least:g}"
            )


class ReasoningGymTask(TaskBase, frozen=True, tag="reasoning_gym"):
    """Prompts of a reasoning-gym dataset, which also judges the completions; needs the extra `reasoning`."""

    judge = "asyncrl.tasks.reasoning_gym:graded_reward"

    dataset: str
    """Its name in reasoning-gym, such as `chain_sum`."""
    options: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """Settings of the generator, such as {max_terms: 3}."""
    instruction: str = "Give your final answer between <answer> and </answer>."
    """Added to every prompt on a line of its own."""
    examples: Natural = 0
    """Solved prompts shown before each one, as earlier turns of the chat."""

    def check(self, run: "Run") -> None:
        if self.examples and not run.rollout.chat:
            raise ConfigError(f"task.examples={self.examples} are turns of a chat: set rollout.chat=true")
        super().check(run)


class VerifiersTask(TaskBase, frozen=True, tag="verifiers"):
    """Prompts, harness and rewards of a `verifiers` environment; needs the extra `verifiers`."""

    judge = "asyncrl.harnesses.verifiers:reward"
    harness = "asyncrl.harnesses.verifiers:agent"

    environment: str
    """An installed taskset, by the id that verifiers knows it by, such as `gsm8k-v1`."""
    args: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """Settings of the environment in verifiers' own names, as in `--env.NAME`: {agent: {max_turns: 4}}."""
    held_out: HeldOut = 0.05
    """Share of the tasks kept for evaluation; of an endless taskset one text in eight is kept."""
    allow_unsafe_exec: bool = False
    """Let programs of agents run the model's commands outside of a container, as you and with all that you can do."""


SingleTask = (
    ChainsTask | JsonlTask | ParquetTask | DatasetTask | PythonTask | CodeTask | ReasoningGymTask | VerifiersTask
)
MAX_SOURCES = 100
"""A hundredth of the prompts is the least that a source can have."""


class Source(Settings, frozen=True):
    """One of several sources of prompts."""

    task: SingleTask
    """Any settings of a task, with its `type`."""
    weight: AboveZero = 1.0
    """Its share of the prompts is this over the sum of all weights."""


class MixTask(TaskBase, frozen=True, kw_only=True, tag="mix"):
    """Prompts of several sources, in fixed shares. One reward judges them all."""

    sources: dict[str, Source]
    """By a name of your own, which prompts, evaluation and report tell them apart by."""

    def __post_init__(self) -> None:
        if not 0 < len(self.sources) <= MAX_SOURCES:
            raise ValueError(f"sources={sorted(self.sources)} must be 1 to {MAX_SOURCES} sources")
        if bad := [name for name in self.sources if not name or "/" in name]:
            raise ValueError(f"sources: {bad[0]!r} must be a name without a slash, such as easy")

    @property
    def weights(self) -> Mapping[str, float]:
        """Sorted by name: the order of a config's lines changes nothing."""
        return {name: self.sources[name].weight for name in sorted(self.sources)}

    @property
    def worked_examples(self) -> ChainsTask | None:
        """Of the longest problems, if all sources are chains."""
        found = [source.task.worked_examples for source in self.sources.values()]
        chains = [each for each in found if each is not None]
        return max(chains, key=lambda each: each.max_size) if len(chains) == len(found) else None

    def check(self, run: "Run") -> None:
        harnesses = {source.task.harness: name for name, source in self.sources.items()}
        if len(harnesses) > 1:
            other = harnesses.pop("", "")
            raise ConfigError(
                f"task.sources.{max(harnesses.values())} is played by a harness of its own, and task.sources.{other} "
                "is not; mix tasks with the same harness, or with none"
            )
        for name, source in self.sources.items():
            try:
                source.task.check(run)
            except ConfigError as error:
                raise ConfigError(f"task.sources.{name}: {error}") from None


TaskSettings = (
    ChainsTask
    | JsonlTask
    | ParquetTask
    | DatasetTask
    | PythonTask
    | CodeTask
    | ReasoningGymTask
    | VerifiersTask
    | MixTask
)
