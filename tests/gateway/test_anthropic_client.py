"""The official client of Anthropic, against the gateway."""

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic

from asyncrl.user_code.agents import Access
from tests.support.character_chat import decode
from tests.support.gateways import RunningGateway, Script, running_gateway

ASK: list[Any] = [{"role": "user", "content": "go"}]
TOOL: Any = {
    "name": "find",
    "description": "Find it.",
    "input_schema": {"type": "object", "properties": {"key": {"type": "string"}}},
}
CALLING = '<think>hm</think>I look<call>find {"key": "a"}</call>'
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningGateway]:
    with running_gateway() as gateway:
        yield gateway


@pytest.fixture
def gateway(shared: RunningGateway) -> Iterator[RunningGateway]:
    yield shared
    for name in list(shared.server._episodes):
        shared.do(shared.server.end(name))


def client(access: Access, **options: Any) -> Anthropic:
    return Anthropic(base_url=access.anthropic_url, api_key=access.key, max_retries=0, **options)


def causes(gateway: RunningGateway) -> list[str]:
    return [branch.cause for branch in gateway.server.episode("1-0").record.trajectory()[1].branches]


def test_a_message(gateway: RunningGateway) -> None:
    script = Script("<think>hm</think>hello")
    with client(gateway.open(script)) as anthropic_client:
        found = anthropic_client.messages.create(model="any", max_tokens=100, system="be brief", messages=ASK)
    [block] = found.content
    assert block.type == "text"
    assert (block.text, found.stop_reason, found.role, found.model) == ("hello", "end_turn", "assistant", "any")
    [request] = script.requests
    assert request.sampling.max_tokens == 100
    assert decode(request.tokens).startswith("<|im_start|>system\nbe brief<|im_end|>\n")
    assert found.usage.input_tokens == len(request.tokens)
    assert found.usage.output_tokens == len("<think>hm</think>hello") + 1


@pytest.mark.parametrize("thinking", [THINKING, {"type": "disabled"}])
def test_tools(gateway: RunningGateway, thinking: Any) -> None:
    script = Script(CALLING, "it is b")
    with client(gateway.open(script)) as anthropic_client:
        first = anthropic_client.messages.create(
            model="p", max_tokens=1500, messages=ASK, tools=[TOOL], thinking=thinking
        )
        kinds = [block.type for block in first.content]
        assert kinds == ["thinking"] * (thinking is THINKING) + ["text", "tool_use"]
        use = first.content[-1]
        assert use.type == "tool_use"
        assert (use.name, use.input, first.stop_reason) == ("find", {"key": "a"}, "tool_use")
        result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "b"}]}
        said: list[Any] = [
            *ASK,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result, {"type": "text", "text": "and now?"}]},
        ]
        second = anthropic_client.messages.create(
            model="p", max_tokens=1500, messages=said, tools=[TOOL], thinking=thinking
        )
    assert second.content[-1].type == "text"
    assert causes(gateway) == []
    told = "<|im_start|>tool\nb<|im_end|>\n<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n"
    assert decode(script.requests[1].tokens).endswith(told)


def test_a_stream(gateway: RunningGateway) -> None:
    with (
        client(gateway.open(Script(CALLING))) as anthropic_client,
        anthropic_client.messages.stream(
            model="p", max_tokens=1500, messages=ASK, tools=[TOOL], thinking=THINKING
        ) as events,
    ):
        raw = [event.type for event in events if event.type in RAW]
        final = events.get_final_message()
    one = ["content_block_start", "content_block_delta", "content_block_stop"]
    thinking = ["content_block_start", *["content_block_delta"] * 2, "content_block_stop"]
    assert raw == ["message_start", *thinking, *one, *one, "message_delta", "message_stop"]
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[2].type == "tool_use"
    assert final.content[2].input == {"key": "a"}
    assert (final.stop_reason, final.usage.output_tokens) == ("tool_use", len(CALLING) + 1)


RAW = {
    "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop"
}  # fmt: skip


def test_an_async_stream(gateway: RunningGateway) -> None:
    async def play() -> str:
        async with (
            AsyncAnthropic(base_url=access.anthropic_url, api_key=access.key) as anthropic_client,
            anthropic_client.messages.stream(model="p", max_tokens=100, messages=ASK) as events,
        ):
            return "".join([text async for text in events.text_stream])

    access = gateway.open(Script("hello"))
    assert asyncio.run(play()) == "hello"


def test_limits_and_stops(gateway: RunningGateway) -> None:
    with client(gateway.open(Script("a long reply", "say STOP now"))) as anthropic_client:
        cut = anthropic_client.messages.create(model="p", max_tokens=6, messages=ASK)
        assert cut.stop_reason == "max_tokens"
        stopped = anthropic_client.messages.create(model="p", max_tokens=90, messages=ASK, stop_sequences=["STOP"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "STOP")


def test_tokens_are_counted_without_a_call(gateway: RunningGateway) -> None:
    script = Script("hello")
    with client(gateway.open(script)) as anthropic_client:
        counted = anthropic_client.messages.count_tokens(model="p", messages=ASK, system="s", tools=[TOOL])
        assert not script.requests
        found = anthropic_client.messages.create(model="p", max_tokens=90, messages=ASK, system="s", tools=[TOOL])
    assert counted.input_tokens == found.usage.input_tokens


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": 3}, "stop_sequences"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[0\].type"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"messages\[0\].content\[0\].type"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\].role"),
    ],
)
def test_errors_name_the_field(gateway: RunningGateway, wrong: dict[str, Any], field: str) -> None:
    expected = pytest.raises(anthropic.BadRequestError, match=field)
    with client(gateway.open(Script())) as anthropic_client, expected as caught:
        anthropic_client.messages.create(**{"model": "p", "max_tokens": 9, "messages": ASK, **wrong})
    assert caught.value.body["type"] == "error"  # type: ignore[index]
    assert caught.value.type == "invalid_request_error"


def test_keys_and_what_does_not_exist(gateway: RunningGateway) -> None:
    access = gateway.open(Script())
    with client(Access(access.url, "wrong")) as stranger, pytest.raises(anthropic.AuthenticationError) as caught:
        stranger.messages.create(model="p", max_tokens=9, messages=ASK)
    assert caught.value.type == "authentication_error"
    with client(access) as anthropic_client:
        assert [model.id for model in anthropic_client.models.list()] == ["policy"]
        with pytest.raises(anthropic.NotFoundError):
            anthropic_client.messages.batches.list()
    bearer = Anthropic(base_url=access.anthropic_url, auth_token=access.key, api_key=None)
    with bearer as anthropic_client:
        assert anthropic_client.models.retrieve("policy").id == "policy"


def test_all_tokens_used_up(gateway: RunningGateway) -> None:
    with client(gateway.open(Script("123456789"), max_tokens=9)) as anthropic_client:
        first = anthropic_client.messages.create(model="p", max_tokens=90, messages=ASK)
        said: list[Any] = [*ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": "on"}]
        for _ in range(8):
            empty = anthropic_client.messages.create(model="p", max_tokens=90, messages=said)
            assert empty.content[0].type == "text"
            assert (empty.content[0].text, empty.stop_reason) == ("", "max_tokens")
        with pytest.raises(anthropic.BadRequestError, match="context length"):
            anthropic_client.messages.create(model="p", max_tokens=90, messages=said)


def test_a_client_that_goes_away_cancels_its_call(gateway: RunningGateway) -> None:
    script = Script()
    access = gateway.open(script)
    script.held = True
    with client(access, timeout=0.3) as anthropic_client, pytest.raises(anthropic.APITimeoutError):
        anthropic_client.messages.create(model="p", max_tokens=90, messages=ASK)
    assert script.cancelled.wait(10)
