"""A harness and an engine that do whatever they may: mostly go on, sometimes edit, branch, sample in parallel."""

import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from asyncrl.chat import Message
from asyncrl.gateway.errors import AbortedError, NoRoomError
from asyncrl.gateway.record import Answer, EpisodeRecord, OpenCall, SampledTokens
from asyncrl.types import Segment, Slot, Trajectory
from tests.support.character_chat import END, CharacterChat, encode

TOOLS = ({"type": "function", "function": {"name": "find"}},)
STYLES = ["whole", "no reasoning", "null", "parts", "json"]


def steps_of(random: Random) -> Iterator[tuple[Any, ...]]:
    """What a harness and an engine may do: mostly go on, sometimes edit, branch, run in parallel, or break off."""

    def text(letters: str, most: int) -> str:
        return "".join(random.choices(letters, k=random.randint(0, most)))

    def reply() -> str:
        thought, said = text("abc", 4), text("ab<c", 6)
        calls = [{"x": random.choice([0, 1, 1.5, 2.0])} for _ in range(random.choice([0, 0, 0, 1, 2]))]
        shown = "".join(f"<call>f {json.dumps(call)}</call>" for call in calls)
        return (f"<think>{thought}</think>" if thought else "") + said + shown

    for _ in range(random.randint(5, 60)):
        kind = random.choices(["begin", "end", "say", "edit", "rewind", "open", "drop"], [10, 10, 8, 1, 1, 1, 1])[0]
        which = random.choice([0, 0, 0, random.randrange(6)])
        match kind:
            case "begin":
                yield kind, which, random.choice([1, 1, 1, 1, 2, 3]), random.choice([TOOLS] * 15 + [()])
            case "end":
                yield kind, which, reply(), random.choice(["stop"] * 8 + ["length", "abort"])
            case "say":
                yield kind, which, random.choice(["user", "user", "tool", "system"]), text("ab<c", 6)
            case "edit":
                yield kind, which, random.randrange(8), text("ab<c", 6)
            case "rewind":
                yield kind, which, random.randint(1, 8)
            case "open":
                yield kind, random.choice(["", "x", "ab"]), text("ab<c", 6)
            case _:
                yield kind, which


def sent_back(reply: Message, style: str) -> Message:
    if style == "no reasoning":
        return {name: value for name, value in reply.items() if name != "reasoning_content"}
    if style == "null" and not reply["content"]:
        return {**reply, "content": None}
    if style == "parts":
        return {**reply, "content": [{"type": "text", "text": reply["content"]}]}
    if style == "json":
        calls = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": json.dumps(json.loads(call["function"]["arguments"]), indent=1),
                },
            }
            for call in reply.get("tool_calls", ())
        ]
        return {**reply, "tool_calls": calls} if calls else reply
    return reply


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def sampled(text: str, *, version: int = 3, finish: str = "stop") -> SampledTokens:
    """As a model writes it: `ab` in two tokens."""
    ids = [token for character in text for token in encode(character)] + [END] * (finish == "stop")
    return SampledTokens((Segment.sampled(ids, [-0.5] * len(ids), version),), finish)  # type: ignore[arg-type]


def random_record(random: Random, **options: Any) -> tuple[EpisodeRecord, int]:
    """With a chat format that changes the history or not, and the tokens that it has room for."""
    chat = CharacterChat(strips=random.random() < 0.5, continues=random.random() < 0.8)
    history, room = random.choice(["keep", "keep", "template"]), random.choice([100, 500, 10_000, 10_000])
    options = {"max_tokens": room, "history": history} | options
    return EpisodeRecord(chat, **options), options["max_tokens"]


def play(
    random: Random,
    record: EpisodeRecord,
    end: Callable[[OpenCall, str, str, int], Answer | None],
    drop: Callable[[OpenCall], None],
) -> None:
    """`end` is told what the model says, how it finishes and the number of the step."""
    style = random.choice(STYLES)
    conversations: list[list[Message]] = [[user("go")]]
    running: list[tuple[OpenCall, int, list[Message]]] = []
    for number, (kind, *what) in enumerate([*steps_of(random), *[("end", 0, "last", "stop")] * 3]):
        if kind == "begin":
            talk = what[0] % len(conversations)
            try:
                calls = record.begin(list(conversations[talk]), what[2], n=what[1])
            except NoRoomError:
                continue
            running += [(call, talk, list(conversations[talk])) for call in calls]
        elif kind == "end" and running:
            call, talk, said = running.pop(what[0] % len(running))
            answer = end(call, what[1], what[2], number)
            if answer is not None and conversations[talk] == said:
                conversations[talk] = [*said, sent_back(answer.reply.message(), style)]
        elif kind == "drop" and running:
            drop(running.pop(what[0] % len(running))[0])
        elif kind == "edit":
            messages = conversations[what[0] % len(conversations)]
            at = what[1] % len(messages)
            messages[at] = {**messages[at], "content": what[2]}
        elif kind == "rewind":
            talk = what[0] % len(conversations)
            conversations.append(conversations[talk][: what[1]])
        elif kind == "open":
            conversations.append([{"role": "system", "content": what[0]}, user(what[1])])
        elif kind == "say":
            conversations[what[0] % len(conversations)].append({"role": what[1], "content": what[2]})


def recorded_episode(random: Random, slot: Slot, *, reward: float, tokens: int) -> Trajectory:
    """One that was played, as the gateway records it, with rewards of turns or without; at least one turn."""
    record, _ = random_record(random, max_tokens=tokens, context=tokens)

    def end(call: OpenCall, text: str, finish: str, number: int) -> Answer | None:
        ids = sampled(text, finish=finish).segments[0].tokens.tolist()[: call.room]
        logprobs = [random.uniform(-5.5, -4) for _ in ids]
        half = random.randint(0, len(ids))
        parts = [(ids[:half], logprobs[:half], number), (ids[half:], logprobs[half:], number + 1)]
        segments = tuple(Segment.sampled(*part) for part in parts)
        try:
            return record.end(call, SampledTokens(segments, finish))  # type: ignore[arg-type]
        except (NoRoomError, AbortedError):
            return None

    play(random, record, end, record.drop)
    turns = len(record.trajectory()[1].turns)
    if not turns:
        return recorded_episode(random, slot, reward=reward, tokens=tokens)
    rewards = [float(random.randint(-2, 2)) for _ in range(turns)] if random.random() < 0.5 else []
    segments, episode = record.trajectory(rewards)
    return Trajectory(
        slot=slot, prompt="p", segments=segments, reward=reward, finish="stop", started=0.0, finished=1.0, engine="e",
        episode=episode,
    )  # fmt: skip
