"""The record holds what the engine was given and what it sampled, whatever a harness does to its history."""

from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.chat import Message
from asyncrl.gateway.causes import BranchCause
from asyncrl.gateway.errors import AbortedError, NoRoomError
from asyncrl.gateway.record import Answer, EpisodeRecord, OpenCall, SampledTokens
from asyncrl.types import GIVEN, Episode, Ints, Segment
from tests.support.character_chat import END, CharacterChat, decode, encode
from tests.support.random_harness import TOOLS, play, random_record, sampled, user

SYSTEM = {"role": "system", "content": "be brief"}


class Harness:
    """Plays an episode call by call."""

    def __init__(self, **options: Any) -> None:
        chat = options.pop("chat", CharacterChat())
        self.tools = options.pop("tools", ())
        self.record = EpisodeRecord(chat, **{"max_tokens": 10_000, **options})
        self.prompts: list[Ints] = []

    def say(self, messages: list[Message], reply: str, **options: Any) -> Message:
        [call] = self.record.begin(messages, options.pop("tools", self.tools))
        self.prompts.append(call.prompt)
        return self.record.end(call, sampled(reply), **options).reply.message()

    @property
    def causes(self) -> list[str]:
        return [branch.cause for branch in self.record.trajectory()[1].branches]


def unrolled(record: EpisodeRecord) -> list[tuple[list[int], list[int], list[float], list[int]]]:
    """For each turn: the tokens before it, its own, their log-probabilities and versions."""
    segments, episode = record.trajectory()
    tokens = np.concatenate([segment.tokens for segment in segments]).tolist() if segments else []
    logprobs = [x for s in segments for x in (s.logprobs.tolist() if s.version != GIVEN else [None] * len(s))]
    versions = [segment.version for segment in segments for _ in range(len(segment))]
    after = list(range(-1, len(tokens) - 1))
    for branch in episode.branches:
        assert branch.after < branch.start
        after[branch.start] = branch.after
    turns = []
    for turn in episode.turns:
        path, position = [], after[turn.start]
        while position >= 0:
            path.append(tokens[position])
            position = after[position]
        own = slice(turn.start, turn.stop)
        assert after[turn.start + 1 : turn.stop] == list(range(turn.start, turn.stop - 1))
        turns.append((path[::-1], tokens[own], logprobs[own], versions[own]))
    assert sum(version != GIVEN for version in versions) == sum(turn.stop - turn.start for turn in episode.turns)
    return turns


def test_a_conversation_is_one_line_and_nothing_sampled_is_tokenized_again() -> None:
    harness = Harness()
    first = harness.say([SYSTEM, user("cab?")], "<think>hm</think>a cab")
    second = [SYSTEM, user("cab?"), first, user("and?")]
    harness.say(second, "no")
    segments, episode = harness.record.trajectory()
    assert (harness.causes, len(episode.turns)) == ([], 2)
    assert [(decode(s.tokens.tolist()), s.version) for s in segments] == [
        ("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\ncab?<|im_end|>\n<|im_start|>assistant\n", GIVEN),
        ("<think>hm</think>a cab<|im_end|>", 3),
        ("\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n", GIVEN),
        ("no<|im_end|>", 3),
    ]
    assert segments[1].tokens.tolist() == [ord(c) for c in "<think>hm</think>a cab"] + [END]
    assert decode(harness.prompts[1].tolist()) == CharacterChat().show(second)


REPLY = '<think>so</think>I look<call>find {"key": 1.0, "where": ["\\u00e9"]}</call>'
BACK: dict[str, Any] = {
    "role": "assistant",
    "content": "I look",
    "tool_calls": [
        {"id": "x", "type": "function", "function": {"name": "find", "arguments": '{"where":["é"],"key":1}'}}
    ],
}


@pytest.mark.parametrize(
    "back",
    [
        BACK,
        {**BACK, "reasoning_content": "so", "refusal": None},
        {**BACK, "reasoning": "so"},
        {**BACK, "content": " I look\n"},
        {**BACK, "content": [{"type": "text", "text": "I "}, {"type": "text", "text": "look"}]},
        dict(reversed(BACK.items())),
    ],
)
def test_a_reply_is_known_however_a_client_sends_it_back(back: Message) -> None:
    harness = Harness(tools=TOOLS)
    harness.say([user("go")], REPLY)
    harness.say([user("go"), back, {"role": "tool", "tool_call_id": "x", "content": "found"}], "done")
    assert harness.causes == []


def test_null_content_beside_tool_calls() -> None:
    harness = Harness(tools=TOOLS)
    first = harness.say([user("go")], "<call>find {}</call>")
    harness.say([user("go"), {**first, "content": None}, {"role": "tool", "content": "x"}], "done")
    assert harness.causes == []


def test_branches_by_cause() -> None:
    harness = Harness(tools=TOOLS)
    asked = [SYSTEM, user("go")]
    first = harness.say(asked, "<think>hm</think>one<call>find {}</call>")
    told = {"role": "tool", "content": "x"}
    harness.say([*asked, first, told], "two")
    harness.say([*asked, first, {"role": "tool", "content": "y"}], "three")
    assert harness.causes == ["earlier_turn"]
    harness.say([*asked, {**first, "content": "uno"}, told], "four")
    assert harness.causes[1:] == ["history_edited"]
    harness.say([*asked, {**first, "reasoning_content": "other"}, told], "four")
    assert harness.causes[2:] == ["history_edited"]
    call = {"type": "function", "function": {"name": "find", "arguments": '{"key": null}'}}
    harness.say([*asked, {**first, "tool_calls": [call]}, told], "five")
    assert harness.causes[3:] == ["tool_call_rerendered"]
    harness.say(asked, "again")
    assert harness.causes[4:] == ["sampled_again"]
    alone = [{"role": "system", "content": "a sub-agent"}, user("go")]
    found = harness.say(alone, "yes")
    assert harness.causes[5:] == ["new_conversation"]
    harness.say([*asked, first, told, {"role": "assistant", "content": "two"}, user("more")], "six")
    assert harness.causes[6:] == ["interleaved"]
    harness.say([*alone, found, user("more")], "seven")
    assert harness.causes[7:] == ["interleaved"]
    harness.say(asked, "eight", tools=[{"type": "function"}])
    assert harness.causes[8:] == ["tools_changed"]


def test_replies_of_one_call_are_parallel_branches() -> None:
    harness = Harness()
    calls = harness.record.begin([user("go")], n=3)
    assert len({call.number for call in calls}) == 3
    for call, text in zip(calls, ("one", "one", "two"), strict=True):
        harness.record.end(call, sampled(text))
    assert harness.causes == ["parallel_call"] * 2
    harness.say([user("go"), {"role": "assistant", "content": "two"}, user("and")], "three")
    assert harness.causes == ["parallel_call"] * 2
    harness.say([user("go"), {"role": "assistant", "content": "one"}, user("and")], "three")
    assert harness.causes == ["parallel_call"] * 2 + ["interleaved"]
    assert [decode(tokens) for _, tokens, _, _ in unrolled(harness.record)] == [
        f"{text}<|im_end|>" for text in ("one", "one", "two", "three", "three")
    ]


def test_a_template_that_strips_reasoning() -> None:
    """`keep` goes on from what was sampled; `template` makes a branch of each later call."""
    kept, rendered = (
        Harness(chat=CharacterChat(strips=True)),
        Harness(chat=CharacterChat(strips=True), history="template"),
    )
    for harness in (kept, rendered):
        messages: list[Message] = []
        for turn in range(3):
            messages.append(user(str(turn)))
            messages.append(harness.say(messages, f"<think>hm{turn}</think>cab"))
    assert kept.causes == []
    assert rendered.causes == ["reasoning_stripped"] * 2


def test_a_template_that_cannot_be_continued() -> None:
    harness = Harness(chat=CharacterChat(continues=False), tools=TOOLS)
    first = harness.say([user("go")], "a cat<call>find {}</call>")
    harness.say([user("go"), first, user("more")], "no")
    assert harness.causes == []
    first = harness.say([user("go"), user("on")], "a cab")
    harness.say([user("go"), user("on"), first, user("more")], "no")
    assert harness.causes == ["history_edited", "rerendered"]
    first = harness.say([user("off")], 'look<call>find {"a": "ab"}</call>')
    harness.say([user("off"), first, user("more")], "no")
    assert harness.causes[2:] == ["new_conversation", "tool_call_rerendered"]


def test_a_stop_text_ends_the_tokens_where_an_engine_would_have_stopped() -> None:
    harness = Harness()
    first = harness.say([user("go")], "think\nObservation: made up", stop=["Obs", "never"])
    assert first["content"] == "think\n"
    [(_, tokens, _, _)] = unrolled(harness.record)
    assert decode(tokens) == "think\nObs"
    assert harness.record.wasted_tokens == len("ervation: made up") + 1
    harness.say([user("go"), first, user("Observation: true")], "ok")
    assert harness.causes == []
    further = "think\nObs<|im_end|>\n<|im_start|>user\nObservation: true<|im_end|>\n<|im_start|>assistant\n"
    assert decode(harness.prompts[1].tolist()).endswith(further)


def test_all_tokens_after_the_first_prompt_are_bounded() -> None:
    harness = Harness(max_tokens=60)
    [call] = harness.record.begin([user("x" * 500)])
    assert call.room == 60
    first = harness.record.end(call, sampled("one", finish="stop")).reply.message()
    calls = harness.record.begin([user("x" * 500), first, user("y")], n=2)
    assert [call.room for call in calls] == [
        60 - 4 - len(encode("\n<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\n"))
    ] * 2
    ends = [harness.record.end(call, sampled("z" * (call.room - 3), finish="stop")) for call in calls]
    assert [end.finish for end in ends] == ["stop", "length"]
    assert len(ends[1].tokens) == 2, "what the other reply left"
    assert harness.record.out_of_room
    with pytest.raises(NoRoomError, match=r"60 tokens of rollout\.max_tokens"):
        harness.record.begin([user("x" * 500), first, user("z")])
    assert sum(map(len, harness.record.trajectory()[0])) == 60 + len(call.prompt)


def test_a_prompt_longer_than_the_model_can_see_is_refused() -> None:
    harness = Harness(context=100)
    with pytest.raises(NoRoomError, match="maximum context length is 100 tokens"):
        harness.record.begin([user("x" * 100)])


def test_what_was_cut_off_leaves_a_count() -> None:
    harness = Harness()
    one, two = harness.record.begin([user("go")], n=2)
    with pytest.raises(AbortedError):
        harness.record.end(one, sampled("cut", finish="abort"))
    harness.record.drop(two, 5)
    segments, episode = harness.record.trajectory()
    assert (segments, episode.turns, episode.wasted_tokens) == ((), (), 3 + 5)


def test_seconds_in_model_and_tools() -> None:
    moments = iter([10.0, 11.0, 13.0, 16.0, 20.0])
    record = EpisodeRecord(CharacterChat(), max_tokens=100, clock=lambda: next(moments))
    [call] = record.begin([user("a")])
    record.end(call, sampled("x"))
    calls = record.begin([user("b")], n=2)
    for call in calls:
        record.end(call, sampled("x"))
    episode = record.trajectory()[1]
    assert (episode.model_s, episode.tools_s) == (1.0 + 3.0, 2.0)


def test_rewards_of_turns() -> None:
    harness = Harness(tools=TOOLS)
    harness.say([user("a")], "x<call>find {}</call><call>find {}</call>")
    assert [(turn.reward, turn.tool_calls) for turn in harness.record.trajectory([0.5])[1].turns] == [(0.5, 2)]
    with pytest.raises(ValueError, match="2 rewards, and the model was called 1 times"):
        harness.record.trajectory([1.0, 2.0])


def test_calls_that_were_answered_empty_have_rewards_too_which_count_for_nothing() -> None:
    harness = Harness(max_tokens=8)
    harness.say([user("a")], "four")
    [call] = harness.record.begin([user("a")])
    harness.record.end(call, SampledTokens((), "stop"))
    with pytest.raises(NoRoomError):
        harness.record.begin([user("b" * 100)])
    harness.record.answer_empty()
    for rewards in ([0.5, 1.0, 2.0], [0.5]):
        assert [turn.reward for turn in harness.record.trajectory(rewards)[1].turns] == [0.5]
    with pytest.raises(ValueError, match="2 rewards, and the model was called 3 times, 2 of them answered without"):
        harness.record.trajectory([1.0, 2.0])


@settings(max_examples=1000, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_tree_is_what_the_engine_was_given_and_sampled(seed: int) -> None:
    """Against a plain list of all calls."""
    random = Random(seed)
    record, room = random_record(random)
    stop = random.choice([(), (), ("<",), ("bc", "cc")])
    expected: list[tuple[list[int], list[int], list[float], list[int]]] = []
    spent = 0

    def end(call: OpenCall, text: str, finish: str, number: int) -> Answer | None:
        nonlocal spent
        answer, spent = _end(record, call, text, finish, stop, number, expected, spent)
        return answer

    def drop(call: OpenCall) -> None:
        nonlocal spent
        record.drop(call, 2)
        spent += 2

    play(random, record, end, drop)
    assert unrolled(record) == expected
    segments, episode = record.trajectory()
    assert episode.wasted_tokens == spent - sum(len(tokens) for _, tokens, _, _ in expected)
    assert {branch.cause for branch in episode.branches} <= set(BranchCause)
    if expected:
        assert sum(map(len, segments)) - len(expected[0][0]) <= room


def _end(
    record: EpisodeRecord,
    call: OpenCall,
    text: str,
    finish: str,
    stop: tuple[str, ...],
    number: int,
    expected: Any,
    spent: int,
) -> tuple[Answer | None, int]:
    tokens = sampled(text, finish=finish).segments[0].tokens.tolist()[: call.room]
    logprobs = np.linspace(-number - 1, -number, len(tokens), dtype=np.float32).tolist()
    half = len(tokens) // 2
    segments = (
        Segment.sampled(tokens[:half], logprobs[:half], number),
        Segment.sampled(tokens[half:], logprobs[half:], number + 1),
    )
    spent += len(tokens)
    try:
        answer = record.end(call, SampledTokens(segments, finish), stop)  # type: ignore[arg-type]
    except (NoRoomError, AbortedError):
        return None, spent
    kept = len(answer.tokens)
    assert answer.tokens.tolist() == tokens[:kept]
    assert answer.stop is not None or answer.finish == "length" or kept == len(tokens)
    if kept:
        versions = [number] * half + [number + 1] * (len(tokens) - half)
        expected.append((call.prompt.tolist(), tokens[:kept], logprobs[:kept], versions[:kept]))
    return answer, spent


def test_a_long_episode_costs_what_its_tokens_cost() -> None:
    """500 turns of 1,000 tokens, with an interleaved sub-agent and a branch now and then."""
    harness = Harness(max_tokens=10**7)
    messages: list[Message] = [SYSTEM]
    side: list[Message] = [user("side")]
    for turn in range(500):
        messages.append(user(f"{turn}:" + "u" * 400))
        messages.append(harness.say(messages, "x" * 500 + str(turn)))
        if turn % 50 == 0:
            harness.say(messages[:-1], "again")
            side.append(harness.say(side, "ok"))
            side.append(user("go on"))
    counts = Counter(harness.causes)
    assert counts == {"sampled_again": 10, "new_conversation": 1, "interleaved": 19 - 1 + 1}
    assert isinstance(harness.record.trajectory()[1], Episode)
