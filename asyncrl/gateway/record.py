"""The record of an episode: what was sampled, token for token, as a tree of turns.

Sampled ids are never tokenized again. A call whose messages begin with those of an earlier call and its reply continues
that reply: its prompt is the tokens up to there, as they were sampled, and what the chat format puts behind them. A
call that continues none is tokenized as a whole. Either way tokens that are there already are not written again, and
what does not go on from the token before it is a branch, with its cause.

A call is written when it ends, with its given tokens: one that was cut off leaves nothing but a count. So turns stand
in the order in which they were answered. Calls may overlap.
"""

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from asyncrl.chat import Message, Reply
from asyncrl.chat.format import NO_OPTIONS
from asyncrl.gateway.causes import BranchCause
from asyncrl.gateway.conversations import Conversation, Conversations, Node, outline, text_of
from asyncrl.gateway.errors import AbortedError, NoRoomError
from asyncrl.gateway.tree import NOTHING, Match, TokenTree
from asyncrl.types import Branch, Episode, Finish, Floats, Ints, Segment, Turn

History = Literal["keep", "template"]
Tools = Sequence[Mapping[str, Any]]
Options = Mapping[str, Any]
OPENING = 16
"""Tokens at the end of a prompt that may say how the reply begins."""


class Chat(Protocol):
    """What the gateway needs of `asyncrl.chat.ChatFormat`."""

    def encode(self, messages: Sequence[Message], tools: Tools = (), *, options: Options = ...) -> list[int]: ...

    def continuation(
        self, messages: Sequence[Message], tools: Tools, kept: int, after: int, *, options: Options = ...
    ) -> list[int] | None: ...

    def parse(
        self, ids: Sequence[int], tools: Tools | None = None, *, prompt: Sequence[int] | None = None, call: int = 0
    ) -> Reply: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class SampledTokens(NamedTuple):
    """What an engine, or several one after the other, sampled for one request."""

    segments: tuple[Segment, ...]
    finish: Finish


@dataclass(kw_only=True, slots=True)
class OpenCall:
    """A call that is being sampled."""

    number: int
    """Of the episode's calls."""
    prompt: Ints
    """All tokens that the engine is given."""
    room: int
    """Tokens that it may sample."""
    tools: Tools
    messages: Sequence[Message]
    conversation: Conversation
    node: Node
    """How far earlier calls had the same messages."""
    base: int
    """The position that `given` goes on from."""
    given: Ints
    match: Match
    size: int
    """Of the tree when `match` was found."""
    began: int
    """Size of the tree when the call began."""


class Answer(NamedTuple):
    """How a call ended."""

    reply: Reply
    finish: Literal["stop", "length"]
    tokens: Ints
    logprobs: Floats
    stop: str | None = None
    """The text that ended it, if one did."""


class _Answered(NamedTuple):
    """A turn in the tree."""

    start: int
    stop: int
    reply: Reply


class EpisodeRecord:
    """Pure and synchronous."""

    def __init__(
        self,
        chat: Chat,
        *,
        max_tokens: int,
        context: int = 0,
        history: History = "keep",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_tokens` bounds all tokens after the first prompt, those of all branches together; `context` is what the
        model can see at once, 0: no bound."""
        self._chat = chat
        self._max_tokens = max_tokens
        self._context = context
        self._history: History = history
        self._tree = TokenTree()
        self._conversations = Conversations()
        self._segments: list[Segment] = []
        self._branches: list[Branch] = []
        self._turns: list[_Answered] = []
        self._answers: list[bool] = []
        """Of each call that was answered, in order: whether it left a turn."""
        self._last_messages: Sequence[Message] = ()
        self._first_prompt = 0
        self._calls = 0
        self._times = _Times(clock)
        self.wasted_tokens = 0
        self.out_of_room = False
        """Whether a call was cut off, or not answered, because all tokens were used up."""

    @property
    def texts(self) -> tuple[str, ...]:
        """The conversation of the last call from the model's first turn on: the model's turns and, in between, what it
        was told."""
        if not self._turns:
            return ()
        told = list[str]()
        texts = list[str]()
        for message in dropwhile(lambda message: message["role"] != "assistant", self._last_messages):
            if message["role"] == "assistant":
                texts += ["\n".join(told)] if texts else []
                texts.append(text_of(message.get("content")))
                told = []
            else:
                told.append(text_of(message.get("content")))
        return (*texts, *(["\n".join(told)] if texts else []), self._turns[-1].reply.content)

    @property
    def last_reply(self) -> Reply | None:
        return self._turns[-1].reply if self._turns else None

    def begin(
        self, messages: Sequence[Message], tools: Tools = (), *, options: Options = NO_OPTIONS, n: int = 1
    ) -> list[OpenCall]:
        """A call that asks for `n` replies is `n` calls. Raises NoRoomError; the chat format's errors pass."""
        said = self._conversations.compared(messages, tools, options)
        node = self._conversations.find(said)
        base, given = self._prompt(messages, tools, options, node)
        prompt = np.concatenate([self._tree.path(base), given])
        match = self._tree.match(base, given)
        room = self._room(len(given) - match.tokens)
        if self._context:
            room = min(room, self._context - len(prompt))
        if room <= 0:
            raise self._no_room(len(prompt))
        size, first = self._tree.size, self._calls
        self._calls += n
        for _ in range(n):
            self._times.begin()
        return [
            OpenCall(
                number=number, prompt=prompt, room=room, tools=tools, messages=messages, conversation=said, node=node,
                base=base, given=given, match=match, size=size, began=size,
            )
            for number in range(first, first + n)
        ]  # fmt: skip

    def count(self, messages: Sequence[Message], tools: Tools = (), *, options: Options = NO_OPTIONS) -> int:
        """Tokens of the prompt that a call would have."""
        node = self._conversations.find(self._conversations.compared(messages, tools, options))
        base, given = self._prompt(messages, tools, options, node)
        return len(self._tree.path(base)) + len(given)

    def _prompt(self, messages: Sequence[Message], tools: Tools, options: Options, node: Node) -> tuple[int, Ints]:
        """The position that a call goes on from, and the tokens after it."""
        if self._history == "keep" and node.replied is not None:
            position = node.replied.position
            after = int(self._tree.tokens(position, position + 1)[0])
            given = self._chat.continuation(messages, tools, node.replied.depth, after, options=options)
            if given is not None:
                return position, np.asarray(given, np.int32)
        return NOTHING, np.asarray(self._chat.encode(messages, tools, options=options), np.int32)

    def _room(self, given: int) -> int:
        """Tokens that may be sampled behind so many new given ones. The first prompt is not counted."""
        used = self._tree.size - self._first_prompt + given if self._tree.size else 0
        return self._max_tokens - used

    def _no_room(self, prompt_tokens: int) -> NoRoomError:
        self.out_of_room = True
        if self._context and prompt_tokens >= self._context:
            return NoRoomError(
                prompt_tokens,
                f"prompt is too long: {prompt_tokens} tokens, and the maximum context length is {self._context} tokens",
            )
        return NoRoomError(
            prompt_tokens,
            "the maximum context length is reached: the episode has used the "
            f"{self._max_tokens} tokens of rollout.max_tokens",
        )

    def end(
        self, call: OpenCall, sampled: SampledTokens, stop: Sequence[str] = (), *, tool_calls: bool = True
    ) -> Answer:
        """Write what was sampled. Raises AbortedError, and NoRoomError if calls that were sampled at the same time have
        used all tokens."""
        segments = [segment for segment in sampled.segments if len(segment)]
        count = sum(map(len, segments))
        if sampled.finish == "abort":
            self.drop(call, count)
            raise AbortedError
        if call.size != self._tree.size:
            call.match, call.size = self._tree.match(call.base, call.given), self._tree.size
        given = call.given[call.match.tokens :]
        room = self._room(len(given))
        if count and room <= 0:
            self.drop(call, count)
            raise self._no_room(len(call.prompt))
        self._times.end()
        if not count:
            self.answer_empty()
            return Answer(Reply(""), "length" if sampled.finish == "length" else "stop", *_arrays([]))
        segments = cut(segments, room)
        answer = self._read(call, segments, stop, call.tools if tool_calls else ())
        if answer.stop is None and (sampled.finish == "length" or len(answer.tokens) < count):
            self.out_of_room |= len(answer.tokens) >= min(room, call.room)
            answer = answer._replace(finish="length")
        self.wasted_tokens += count - len(answer.tokens)
        self._write(call, given, cut(segments, len(answer.tokens)), answer.reply)
        return answer

    def answer_empty(self, calls: int = 1) -> None:
        """These were answered without a token, as at the end of the context."""
        self._answers += [False] * calls

    def drop(self, call: OpenCall, sampled_tokens: int = 0) -> None:
        """A call that was cut off."""
        self._times.end()
        self.wasted_tokens += sampled_tokens

    def _read(self, call: OpenCall, segments: Sequence[Segment], stop: Sequence[str], tools: Tools) -> Answer:
        """The reply in sampled tokens. A stop text ends it: the tokens end with the first after which the content holds
        it, as if the engine had stopped there, and the content before it."""
        tokens, logprobs = _arrays(segments)
        ids, opening = tokens.tolist(), call.prompt[-OPENING:].tolist()

        def read(count: int) -> Reply:
            return self._chat.parse(ids[:count], tools, prompt=opening, call=call.number)

        kept, reply = len(ids), read(len(ids))
        if stop and _stop(reply, stop):
            kept = bisect_left(range(len(ids)), True, key=lambda count: _stop(read(count), stop) is not None)
            reply = read(kept)
        if (found := _stop(reply, stop)) is None:
            return Answer(reply, "stop", tokens, logprobs)
        position, text = found
        reply = msgspec.structs.replace(reply, content=reply.content[:position], tool_calls=())
        return Answer(reply, "stop", tokens[:kept], logprobs[:kept], text)

    def _write(self, call: OpenCall, given: Ints, segments: Sequence[Segment], reply: Reply) -> None:
        after, start = call.match.position, self._tree.size
        message = reply.message()
        if start and after != start - 1:
            self._branches.append(Branch(start, after, self._cause(call)))
        if not start:
            self._first_prompt = len(given)
        if len(given):
            self._segments.append(Segment.given(given))
        self._segments += segments
        self._tree.append(after, np.concatenate([given, *(segment.tokens for segment in segments)]))
        self._last_messages = call.messages
        self._turns.append(_Answered(start + len(given), self._tree.size, reply))
        self._answers.append(True)
        self._conversations.add(call.conversation, call.node, message, self._tree.size - 1)

    def _cause(self, call: OpenCall) -> BranchCause:
        """Why a call does not go on from the last token that was written."""
        position, said = call.match.position, call.conversation
        following = self._tree.first_after(position)
        if following is None:
            return BranchCause.INTERLEAVED
        node = self._conversations.find(said, call.node)
        if node.depth <= said.opening:
            return BranchCause.TOOLS_CHANGED if self._conversations.begun(said) else BranchCause.NEW_CONVERSATION
        if following >= call.began:
            return BranchCause.PARALLEL_CALL
        if node.replied is not None and (rendering := self._rendering(call, node)):
            return rendering
        if node.depth == len(call.messages):
            return BranchCause.SAMPLED_AGAIN
        message = call.messages[node.depth]
        if message["role"] != "assistant":
            return BranchCause.EARLIER_TURN if node is node.replied else BranchCause.HISTORY_EDITED
        arguments_alone = outline(message) in node.outlines and said.digests[node.depth] not in node.children
        return BranchCause.TOOL_CALL_RERENDERED if arguments_alone else BranchCause.HISTORY_EDITED

    def _rendering(self, call: OpenCall, node: Node) -> BranchCause | None:
        """What the chat template changed in what was sampled and came back as it was, if it changed anything."""
        position, replied = call.match.position, node.replied
        if call.base != NOTHING or replied is None or self._tree.goes_through(position, replied.position):
            return None
        while replied is not None:
            turn = self._turns[bisect_right(self._turns, replied.position, key=lambda turn: turn.stop)]
            if position == self._tree.before(turn.start) or turn.start <= position < turn.stop - 1:
                return self._changed(turn, max(turn.start, position + 1), call.tools)
            replied = replied.parent and replied.parent.replied
        return BranchCause.RERENDERED

    def _changed(self, turn: _Answered, position: int, tools: Tools) -> BranchCause:
        """Which part of a turn the first token lies in that was rendered in another way."""
        before = self._tree.path(self._tree.before(turn.start))[-OPENING:].tolist()
        same = self._chat.parse(self._tree.tokens(turn.start, position).tolist(), tools, prompt=before)
        if turn.reply.reasoning and not (same.content.strip() or same.tool_calls):
            return BranchCause.REASONING_STRIPPED
        if turn.reply.tool_calls and same.content.strip().startswith(turn.reply.content.strip()):
            return BranchCause.TOOL_CALL_RERENDERED
        return BranchCause.RERENDERED

    def trajectory(self, turn_rewards: Sequence[float] = ()) -> tuple[tuple[Segment, ...], Episode]:
        """What was sampled so far. `turn_rewards` are in the order in which the calls were answered. Those of calls
        that were answered without a token count for nothing, and may be left out."""
        if len(turn_rewards) == len(self._answers):
            rewards = [reward for reward, turn in zip(turn_rewards, self._answers, strict=True) if turn]
        elif len(turn_rewards) == len(self._turns):
            rewards = turn_rewards
        elif not turn_rewards:
            rewards = [0.0] * len(self._turns)
        else:
            empty = len(self._answers) - len(self._turns)
            without = f", {empty} of them answered without a token" if empty else ""
            raise ValueError(
                f"turn_rewards has {len(turn_rewards)} rewards, and the model was called {len(self._answers)} "
                f"times{without}; give one for each call that was answered, in that order, or none"
            )
        turns = [
            Turn(turn.start, turn.stop, float(reward), len(turn.reply.tool_calls))
            for turn, reward in zip(self._turns, rewards, strict=True)
        ]
        episode = Episode(
            branches=tuple(self._branches),
            turns=tuple(turns),
            model_s=self._times.model_s,
            tools_s=self._times.tools_s,
            wasted_tokens=self.wasted_tokens,
        )
        return tuple(self._segments), episode


def cut(segments: Sequence[Segment], tokens: int) -> list[Segment]:
    """The first tokens of some segments."""
    kept = list[Segment]()
    for segment in segments:
        if len(segment) > tokens:
            if tokens:
                kept.append(Segment.sampled(segment.tokens[:tokens], segment.logprobs[:tokens], segment.version))
            break
        kept.append(segment)
        tokens -= len(segment)
    return kept


def _arrays(segments: Sequence[Segment]) -> tuple[Ints, Floats]:
    if len(segments) == 1:
        return segments[0].tokens, segments[0].logprobs
    tokens = [np.empty(0, np.int32), *(segment.tokens for segment in segments)]
    return np.concatenate(tokens), np.concatenate([np.empty(0, np.float32), *(each.logprobs for each in segments)])


def _stop(reply: Reply, stop: Sequence[str]) -> tuple[int, str] | None:
    """Where the first stop text begins."""
    return min(((i, text) for text in stop if (i := reply.content.find(text)) >= 0), default=None)


class _Times:
    """How long the model and the tools took."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._running = 0
        self._since = 0.0
        self.model_s = 0.0
        """Seconds in which at least one call was being sampled."""
        self.tools_s = 0.0
        """Seconds between two calls in which none was."""
        self._ended: float | None = None

    def begin(self) -> None:
        if not self._running:
            self._since = self._clock()
            if self._ended is not None:
                self.tools_s += self._since - self._ended
        self._running += 1

    def end(self) -> None:
        self._running -= 1
        if not self._running:
            self._ended = self._clock()
            self.model_s += self._ended - self._since
