"""Whether a chat template only appends: the prompt of each call begins with the prompt and the reply of the one before.

Found by rendering conversations whose parts can be recognized, and looking for them in the prompt of the next call.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from asyncrl.chat.messages import Message, Reply, ToolCall, Tools
from asyncrl.errors import ChatError

Render = Callable[[Sequence[Message], Tools], str]
"""The prompt of the call that these messages lead to."""

KEEPING = "agent.history=keep continues from the sampled tokens instead"


class Step(NamedTuple):
    """From one call to the next."""

    before: list[Message]
    after: list[Message]
    reply: tuple[str, ...]
    """Texts of the reply between the two, which have to follow the prompt of the first."""
    caused_by: str
    """Role of the message that led to the second."""


def changes_of_history(render: Render, tools: Tools, *, reasoning: bool) -> str:
    """What the template changes in the history and what that costs, in a sentence; empty: it only appends.

    `tools` is empty for a template that has none; `reasoning`: replies have one.
    """
    plain = _changed(render, (), reasoning=False)
    found = _leaves_out_reasoning(render, tools) if reasoning else ""
    if not found and plain:
        found = _sentence("does not begin earlier turns as it began them when they were sampled", plain)
    if not found and (moved := _changed(render, (), reasoning=False, system=True)):
        found = _sentence("moves the system message", moved)
    if not found and tools:
        if moved := _changed(render, tools, reasoning=False, calls=False):
            found = _sentence("moves the list of tools", moved)
        elif changed := _changed(render, tools, reasoning=False):
            found = _sentence("shows earlier tool calls in another way", changed)
    return found


def _leaves_out_reasoning(render: Render, tools: Tools) -> str:
    missing = _changed(render, tools, reasoning=True) or _changed(render, (), reasoning=True)
    if "tool" in missing or (missing and not tools):
        return _sentence("leaves out the reasoning of earlier turns", missing)
    return _sentence("leaves out the reasoning of turns before the last user message", missing) if missing else ""


def _sentence(change: str, caused_by: set[str]) -> str:
    calls = "call after a new user message" if caused_by == {"user"} else "later call of an episode"
    return f"the chat template {change}: each {calls} becomes a branch, prefilled and trained on its own; {KEEPING}"


def _changed(render: Render, tools: Tools, *, reasoning: bool, system: bool = False, calls: bool = True) -> set[str]:
    """Roles of the messages after which a prompt does not continue the one before."""
    try:
        return {
            step.caused_by
            for step in _steps(calls=bool(tools) and calls, reasoning=reasoning, system=system)
            if not _continues(render(step.before, tools), render(step.after, tools), step.reply)
        }
    except ChatError:
        return set()  # what a template refuses to show, it does not change


def _continues(before: str, after: str, reply: Sequence[str]) -> bool:
    if not after.startswith(before):
        return False
    places = [after.find(text, len(before)) for text in reply]
    return -1 not in places and places == sorted(places)


def _steps(*, calls: bool, reasoning: bool, system: bool) -> Iterator[Step]:
    messages: list[Message] = [{"role": "system", "content": "probe-system"}] if system else []
    messages.append({"role": "user", "content": "probe-question-0"})
    for turn in range(1, 4):
        before = list(messages)
        thought, said, argument = (f"probe-{part}-{turn}" for part in ("reasoning", "answer", "argument"))
        texts = [thought] if reasoning else []
        if calls and turn == 1:
            call = ToolCall(f"probe000{turn}", "look_up", f'{{"key": "{argument}"}}')
            reply = Reply("", thought if reasoning else "", (call,))
            messages += [reply.message(), {"role": "tool", "tool_call_id": call.id, "content": f"probe-result-{turn}"}]
            texts.append(argument)
        else:
            messages += [
                Reply(said, thought if reasoning else "").message(),
                {"role": "user", "content": f"probe-question-{turn}"},
            ]
            texts.append(said)
        yield Step(before, list(messages), tuple(texts), messages[-1]["role"])
