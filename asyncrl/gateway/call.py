"""A call and its answers, whichever API it came through."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import xxhash

from asyncrl.chat import Message
from asyncrl.chat.format import NO_OPTIONS
from asyncrl.gateway.errors import CallError
from asyncrl.gateway.record import Answer, Tools

MAX_CHOICES = 128


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """What the model is asked for. How tokens are drawn is the run's to say, because training assumes it."""

    messages: list[Message]
    tools: Tools = ()
    tool_calls: bool = True
    """Whether what the model writes as a tool call is one."""
    options: Mapping[str, Any] = NO_OPTIONS
    """Variables of the chat template."""
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()


class Answers(NamedTuple):
    """The replies to a call."""

    id: str
    """Unique in the episode."""
    created: float
    prompt_tokens: int
    choices: Sequence[Answer]
    decode: Callable[[Sequence[int]], str]
    """Of tokens, for their log-probabilities."""

    @property
    def sampled_tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self.choices)


class Event(NamedTuple):
    """One of a stream; data that is no text is JSON."""

    name: str
    data: Any

    def encode(self) -> bytes:
        name = f"event: {self.name}\n" if self.name else ""
        data = self.data if isinstance(self.data, str) else msgspec.json.encode(self.data).decode()
        return f"{name}data: {data}\n\n".encode()


class ApiRequest(Protocol):
    """The body of a request, in the form of one API."""

    @property
    def stream(self) -> bool | None: ...

    def call(self, history: "History") -> Call:
        """Raises CallError for what is not supported."""
        ...

    def response(self, answers: Answers, history: "History") -> Any: ...

    def events(self, answers: Answers, history: "History") -> Iterable[Event]: ...


class History:
    """What the responses of an episode ended, for `previous_response_id`: a tree that has each message once, although
    most clients send all of them again with each call."""

    def __init__(self) -> None:
        self._root = _Said()
        self._ends: dict[str, _Said] = {}

    def __contains__(self, response: str) -> bool:
        return response in self._ends

    def messages(self, response: str) -> list[Message]:
        """Up to the response, itself included."""
        found, said = list[Message](), self._ends[response]
        while said.before is not None:
            found.append(said.message)
            said = said.before
        return found[::-1]

    def add(self, response: str, earlier: str | None, messages: Sequence[Message]) -> None:
        """A response that ended these messages, which came after those of an earlier one, if there is one."""
        said = self._root if earlier is None else self._ends[earlier]
        for message in messages:
            digest = xxhash.xxh3_128_digest(msgspec.json.encode(message))
            if (following := said.after.get(digest)) is None:
                following = said.after[digest] = _Said(message, said)
            said = following
        self._ends[response] = said


class _Said:
    """A message after those before it."""

    __slots__ = ("after", "before", "message")

    def __init__(self, message: Message | None = None, before: "_Said | None" = None) -> None:
        self.message: Message = message or {}
        self.before = before
        self.after: dict[bytes, _Said] = {}


def function_tool(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """A tool as chat templates get it, the same from each API."""
    optional = {"description": description, "parameters": parameters}
    return {"type": "function", "function": {"name": name} | {k: v for k, v in optional.items() if v is not None}}


def unsupported(field: str, why: str) -> CallError:
    return CallError(400, f"{field} is not supported: {why}", field=field, code="unsupported_parameter")


def invalid(field: str, why: str) -> CallError:
    return CallError(400, f"{field}: {why}", field=field, code="invalid_value")


def check_max_tokens(field: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise invalid(field, f"{value} is below 1")
    return value


FORCED_TOOLS = "the model chooses whether to call a tool, as it does in training; use auto or none"
FORCED_FORM = "forcing a form would change the distribution that training assumes; ask for it in the prompt"
TEXT_ALONE = "messages hold text alone"


def token_logprobs(answer: Answer, decode: Callable[[Sequence[int]], str]) -> list[dict[str, Any]]:
    """Of each sampled token, as both OpenAI APIs have them. A token may be a part of a character."""
    texts = [decode([token]) for token in answer.tokens.tolist()]
    return [
        {
            "token": text,
            "logprob": logprob,
            "bytes": None if "\ufffd" in text else list(text.encode()),
            "top_logprobs": [],
        }
        for text, logprob in zip(texts, answer.logprobs.tolist(), strict=True)
    ]
