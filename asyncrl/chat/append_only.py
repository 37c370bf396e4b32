"""Whether a chat template only appends: the prompt of each call begins with the prompt and the reply of the one before.

Found by rendering conversations whose parts can be recognized, and looking for them in the prompt of the next call.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

from asyncrl.chat.messages import Message, Reply, ToolCall, Tools
from asyncrl.errors import ChatError

KEEPING = "agent.history=keep continues from the sampled tokens instead"

Change = Literal["earlier messages", "start of turn", "reasoning", "reply"]


class Render(Protocol):
    def __call__(self, messages: Sequence[Message], tools: Tools, *, open_turn: bool) -> str:
        """The messages as the template shows them, with `open_turn` up to where the model's next turn begins."""
        ...


class Step(NamedTuple):
    """From one call to the next."""

    before: list[Message]
    after: list[Message]
    reasoning: str
    said: str
    """A text or an argument; after the reasoning it is what the reply between the two calls consists of."""
    led_to_by: str
    """Role of the message that led to the second call."""


def changes_of_history(render: Render, tools: Tools, *, reasoning: bool) -> str:
    """What the template changes in the history and what that costs, in a sentence; empty: it only appends.

    `tools` is empty for a template that has none; `reasoning`: replies have one.
    """
    without_reasoning = _changes(render, tools)
    begun, lost = without_reasoning("start of turn"), set[str]()
    if reasoning:
        with_reasoning = _changes(render, tools, reasoning=True)
        begun, lost = begun & with_reasoning("start of turn"), with_reasoning("reasoning")
    if lost and begun <= lost:
        turns = "earlier turns" if "tool" in lost or not tools else "turns before the last user message"
        return _sentence(f"leaves out the reasoning of {turns}", lost)
    if begun:
        return _sentence("does not begin earlier turns as it began them when they were sampled", begun | lost)
    if moved := _changes(render, (), system=True)("earlier messages"):
        return _sentence("moves the system message", moved)
    if moved := _changes(render, tools, calls=False)("earlier messages"):
        return _sentence("moves the list of tools", moved)
    if changed := without_reasoning("earlier messages", "reply"):
        what = "tool calls and their results" if tools else "turns"
        return _sentence(f"shows earlier {what} in another way", changed)
    return ""


def _sentence(change: str, led_to_by: set[str]) -> str:
    calls = "call after a new user message" if led_to_by == {"user"} else "later call of an episode"
    return f"the chat template {change}: each {calls} becomes a branch, prefilled and trained on its own; {KEEPING}"


def _changes(
    render: Render, tools: Tools, *, reasoning: bool = False, system: bool = False, calls: bool = True
) -> Callable[..., set[str]]:
    """Roles of the messages that lead to a call whose prompt has these changes."""
    found = list[tuple[Change, str]]()
    try:
        for step in _steps(reasoning=reasoning, system=system, calls=bool(tools) and calls):
            found += [(change, step.led_to_by) for change in _changed(render, tools, step)]
    except ChatError:
        found.clear()  # what a template refuses to show, it does not change
    return lambda *changes: {role for change, role in found if change in changes}


def _changed(render: Render, tools: Tools, step: Step) -> Iterator[Change]:
    history, before = (render(step.before, tools, open_turn=open_turn) for open_turn in (False, True))
    after = render(step.after, tools, open_turn=True)
    if not after.startswith(history):
        yield "earlier messages"
    elif not after.startswith(before):
        yield "start of turn"
    if step.reasoning not in after:
        yield "reasoning"
    elif step.said not in after[after.index(step.reasoning) :]:
        yield "reply"


def _steps(*, reasoning: bool, system: bool, calls: bool) -> Iterator[Step]:
    messages: list[Message] = [{"role": "system", "content": "probe-system"}] if system else []
    messages.append({"role": "user", "content": "probe-question-0"})
    for turn in range(1, 5):
        before = list(messages)
        thought = f"probe-reasoning-{turn}" if reasoning else ""
        if calls and turn <= 2:
            said = f"probe-argument-{turn}"
            call = ToolCall(f"probe000{turn}", "look_up", f'{{"key": "{said}"}}')
            messages += [
                Reply("", thought, (call,)).message(),
                {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": f"probe-result-{turn}"},
            ]
        else:
            said = f"probe-answer-{turn}"
            messages += [
                Reply(said, thought).message(),
                {"role": "user", "content": f"probe-question-{turn}"},
            ]
        yield Step(before, list(messages), thought, said, messages[-1]["role"])
