"""Which messages the calls of an episode had: a tree of messages, to find the reply that a new call continues.

What a client sends back of a reply is rarely what it got: reasoning is missing, content is null beside tool calls or a
list of parts, arguments are another text of the same JSON, keys have another order, ids of calls are new. Messages are
equal here if they differ in nothing but that. Reasoning that is sent back has to be the model's.
"""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import msgspec
import xxhash

from asyncrl.chat import Message
from asyncrl.chat.messages import REASONING_FIELDS

SYSTEM = ("system", "developer")
_DIGEST = xxhash.xxh3_128_digest


class Conversation(NamedTuple):
    """The messages of a call, as they are compared."""

    root: bytes
    """Of the tools and options, which a template shows before all messages."""
    digests: Sequence[bytes]
    reasoning: Sequence[str]
    """Of each message; empty where none was sent."""
    opening: int
    """Messages before the first that is not the system's."""


class Node:
    """A message after the messages before it."""

    __slots__ = ("children", "depth", "outlines", "parent", "position", "reasoning", "replied")

    def __init__(self, parent: "Node | None" = None, reasoning: str = "") -> None:
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.reasoning = reasoning
        self.position = -1
        """Of the last token, if the model sampled this message."""
        self.replied: Node | None = None if parent is None else parent.replied
        """The last reply of the model up to here, this one included."""
        self.children: dict[bytes, list[Node]] = {}
        self.outlines: set[bytes] = set()
        """Replies that followed, without the arguments of their tool calls."""


class Conversations:
    def __init__(self) -> None:
        self._roots: dict[bytes, Node] = {}
        self._openings: set[bytes] = set()
        """Messages that conversations began with, whatever their tools."""
        self._seen: dict[bytes, tuple[bytes, str]] = {}
        """Digest and reasoning of messages that were compared before, by their exact text: each call has all of them
        again."""

    def compared(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> Conversation:
        digests, reasoning = list[bytes](), list[str]()
        for message in messages:
            exact = _DIGEST(msgspec.json.encode(message))
            if (known := self._seen.get(exact)) is None:
                known = self._seen[exact] = message_digest(message), reasoning_of(message)
            digests.append(known[0])
            reasoning.append(known[1])
        opening = sum(1 for _ in takewhile(lambda message: message["role"] in SYSTEM, messages))
        root = _DIGEST(msgspec.json.encode((tools, dict(options)), order="deterministic"))
        return Conversation(root, digests, reasoning, opening)

    def find(self, conversation: Conversation, start: Node | None = None) -> Node:
        """The deepest node that the messages lead to, from `start` on. If they lead to several, because the reasoning
        that told them apart is missing, it is the last one sampled."""
        nodes = [start or self._roots.setdefault(conversation.root, Node())]
        for depth in range(nodes[0].depth, len(conversation.digests)):
            digest, reasoning = conversation.digests[depth], conversation.reasoning[depth]
            further = [
                child
                for node in nodes
                for child in node.children.get(digest, ())
                if not reasoning or child.reasoning == reasoning
            ]
            if not further:
                break
            nodes = further
        return max(nodes, key=_recency)

    def begun(self, conversation: Conversation) -> bool:
        """Whether an earlier call began with the same messages, with whatever tools."""
        return _opening(conversation) in self._openings

    def add(self, conversation: Conversation, start: Node, reply: Message, position: int) -> None:
        """A call that `start` was found for, and its reply, whose last token is at `position`."""
        self._openings.add(_opening(conversation))
        node = self.find(conversation, start)
        for depth in range(node.depth, len(conversation.digests)):
            node = _added(node, conversation.digests[depth], conversation.reasoning[depth])
        node.outlines.add(outline(reply))
        digest, reasoning = message_digest(reply), reasoning_of(reply)
        same = [child for child in node.children.get(digest, ()) if child.reasoning == reasoning]
        node = same[0] if same else _added(node, digest, reasoning)
        node.position, node.replied = position, node


def _added(parent: Node, digest: bytes, reasoning: str) -> Node:
    node = Node(parent, reasoning)
    parent.children.setdefault(digest, []).append(node)
    return node


def _recency(node: Node) -> int:
    return -1 if node.replied is None else node.replied.position


def _opening(conversation: Conversation) -> bytes:
    return b"".join(conversation.digests[: conversation.opening + 1])


def message_digest(message: Message) -> bytes:
    calls = [(name, _canonical(arguments)) for name, arguments in _calls(message)]
    return _DIGEST(msgspec.json.encode((message["role"], _content(message), message.get("name"), calls)))


def outline(message: Message) -> bytes:
    """The same without the arguments of tool calls."""
    return _DIGEST(msgspec.json.encode((_content(message), [name for name, _ in _calls(message)])))


def reasoning_of(message: Message) -> str:
    return next((message[name].strip() for name in REASONING_FIELDS if message.get(name)), "")


def _content(message: Message) -> str:
    """Clients trim what the model said, never what the model is told."""
    content = text_of(message.get("content"))
    return content.strip() if message["role"] == "assistant" else content


def text_of(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """Content as one text, in whichever form it came."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content or ())


def _calls(message: Message) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [(function["name"], function["arguments"]) for function in functions]


def _canonical(arguments: Any) -> bytes:
    """The same for each text of the same JSON."""
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            return arguments.encode()
    return msgspec.json.encode(_integral(arguments), order="sorted")


def _integral(value: Any) -> Any:
    """JavaScript writes 1.0 as 1."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case dict():
            return {name: _integral(each) for name, each in value.items()}
        case list():
            return [_integral(each) for each in value]
        case _:
            return value
