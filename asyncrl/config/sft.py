"""The examples of a supervised start: where they are, what of them is trained on."""

from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from asyncrl.config.base import Natural, Settings
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.config.run import Run


class Sft(Settings, frozen=True):
    """Examples to learn from, as chats or as prompts with their completions."""

    path: str = ""
    """A JSON-lines file, a Parquet file or a directory of them, a directory that `save_to_disk` wrote, or the name of a
    dataset of the Hugging Face hub (the last two need the extra `datasets`)."""
    config: str = ""
    """Of a dataset of the hub: which one of several under the same name."""
    split: str = "train"
    """Of a dataset."""
    messages: str = "messages"
    """Column of the chats: messages as OpenAI's API has them, with tool calls and tool results. An assistant's message
    with `"weight": 0` is not trained on."""
    tools: str = "tools"
    """Column of the tools that a chat can call, if there is one."""
    prompt: str = "prompt"
    """Column of the prompts, where there are no chats: a text, or the messages before the completion."""
    completion: str = "completion"
    """Column of their completions: a text, or the messages after the prompt."""
    train_on: Literal["assistant", "last"] = "assistant"
    """Every turn of the model's, or the last one alone."""
    max_length: Annotated[int, Meta(ge=2)] = 2048
    """Tokens of an example at most, its prompt included."""
    too_long: Literal["skip", "cut"] = "skip"
    """An example of more tokens: leave it out, or train on its first ones. Either is counted."""
    shuffle: bool = True
    """Another order in each epoch, by `seed`; or that of the file."""
    epochs: Natural = 0
    """How often each example may be trained on: more `steps` than that takes are refused. 0: as often as `steps`
    take."""
    held_out: Annotated[float, Meta(ge=0, lt=1)] = 0.05
    """Share of the examples kept for the held-out loss, which is that of `evaluation.prompts` of them at most."""

    @property
    def on(self) -> bool:
        return bool(self.path)


def check_sft(run: "Run") -> None:
    """Refuse what examples cannot be trained with: they were not sampled, and each stands for itself."""
    if not run.sft.on:
        if run.sft != Sft():
            raise ConfigError("sft.* is set and sft.path is not: name the examples, or leave the rest out")
        return
    if not run.algorithm.on_data:
        raise ConfigError(
            f"sft.path={run.sft.path}: algorithm={run.algorithm.kind} learns from samples with rewards, and examples "
            "have none; use pipeline=sft, which has algorithm=sft"
        )
    if run.rollout.group_size != 1:
        raise ConfigError(
            f"rollout.group_size={run.rollout.group_size}: an example is a group of its own; set rollout.group_size=1, "
            "and flow.groups_per_step to the examples of a step"
        )
