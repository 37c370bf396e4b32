"""The official client of OpenAI, against the gateway: chat completions and responses."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from asyncrl.user_code.agents import Access
from tests.support.character_chat import END, decode
from tests.support.gateways import RunningGateway, Script, running_gateway

ASK: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "go"}]
PARAMETERS = {"type": "object", "properties": {"key": {"type": "string"}}}
TOOL: Any = {"type": "function", "function": {"name": "find", "description": "Find it.", "parameters": PARAMETERS}}
FLAT_TOOL: Any = {"type": "function", "name": "find", "description": "Find it.", "parameters": PARAMETERS}
CALLING = '<think>hm</think>I look<call>find {"key": "a"}</call>'


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningGateway]:
    with running_gateway() as gateway:
        yield gateway


@pytest.fixture
def gateway(shared: RunningGateway) -> Iterator[RunningGateway]:
    yield shared
    for name in list(shared.server._episodes):
        shared.do(shared.server.end(name))


def client(access: Access, **options: Any) -> OpenAI:
    return OpenAI(base_url=access.url, api_key=access.key, max_retries=0, **options)


def causes(gateway: RunningGateway, name: str = "1-0") -> list[str]:
    return [branch.cause for branch in gateway.server.episode(name).record.trajectory()[1].branches]


def test_a_chat(gateway: RunningGateway) -> None:
    script = Script("<think>hm</think>hello")
    with client(gateway.open(script)) as openai_client:
        found = openai_client.chat.completions.create(model="any", messages=ASK, temperature=0.1, top_p=0.5, seed=3)
    [choice] = found.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "hello", "stop")
    assert choice.message.reasoning_content == "hm"  # type: ignore[attr-defined]
    assert choice.message.tool_calls is None
    assert (found.object, found.model) == ("chat.completion", "any")
    [request] = script.requests
    assert decode(request.tokens).endswith("<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n")
    assert request.sampling.temperature == 1.0, "the run's sampling rules"
    assert request.sampling.stop == (END,)
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (
        len(request.tokens),
        len("<think>hm</think>hello") + 1,
    )
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_tools(gateway: RunningGateway, stream: bool) -> None:
    script = Script(CALLING, "it is b")
    messages = list(ASK)
    with client(gateway.open(script)) as openai_client:
        first = openai_client.chat.completions.create(model="p", messages=messages, tools=[TOOL])
        [call] = first.choices[0].message.tool_calls or ()
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("find", '{"key": "a"}')
        assert first.choices[0].finish_reason == "tool_calls"
        messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "b"}]
        if stream:
            with openai_client.chat.completions.create(
                model="p", messages=messages, tools=[TOOL], stream=True
            ) as chunks:
                text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        else:
            second = openai_client.chat.completions.create(
                model="p", messages=messages, tools=[TOOL], tool_choice="auto"
            )
            text = second.choices[0].message.content or ""
    assert text == "it is b"
    assert causes(gateway) == []
    assert script.requests[1].tokens[: len(script.requests[0].tokens)] == script.requests[0].tokens
    assert json.dumps([TOOL]) in decode(script.requests[0].tokens)
    assert "I look<call>" in decode(script.requests[1].tokens)


def test_a_stream_has_what_the_reply_has(gateway: RunningGateway) -> None:
    with (
        client(gateway.open(Script(CALLING, CALLING))) as openai_client,
        openai_client.chat.completions.stream(
            model="p", messages=ASK, tools=[TOOL], n=2, stream_options={"include_usage": True}, logprobs=True
        ) as events,
    ):
        chunks = [event.chunk for event in events if event.type == "chunk"]
        final = events.get_final_completion()
    assert len(final.choices) == 2
    for choice in final.choices:
        assert (choice.message.content, choice.finish_reason) == ("I look", "tool_calls")
        [call] = choice.message.tool_calls or ()
        assert call.function.arguments == '{"key": "a"}'
        assert choice.logprobs is not None
        assert len(choice.logprobs.content or ()) == len(CALLING) + 1
    assert final.usage is not None
    assert final.usage.completion_tokens == 2 * (len(CALLING) + 1)
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    reasoning = [getattr(c.delta, "reasoning_content", None) for chunk in chunks for c in chunk.choices]
    assert list(filter(None, reasoning)) == ["hm", "hm"]


def test_several_replies(gateway: RunningGateway) -> None:
    script = Script("one", "two", "three", "four")
    with client(gateway.open(script)) as openai_client:
        found = openai_client.chat.completions.create(model="p", messages=ASK, n=3)
        assert [choice.message.content for choice in found.choices] == ["one", "two", "three"]
        assert [choice.index for choice in found.choices] == [0, 1, 2]
        assert len({request.seed for request in script.requests}) == 3
        further = [*ASK, found.choices[1].message, {"role": "user", "content": "on"}]
        openai_client.chat.completions.create(model="p", messages=further)
    assert causes(gateway) == ["parallel_call", "parallel_call", "interleaved"]


def test_limits_stops_and_logprobs(gateway: RunningGateway) -> None:
    script = Script("a long reply", "say STOP now", "aé")
    with client(gateway.open(script)) as openai_client:
        cut = openai_client.chat.completions.create(model="p", messages=ASK, max_completion_tokens=6, max_tokens=9)
        assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("a long", "length")
        stopped = openai_client.chat.completions.create(model="p", messages=ASK, stop=["STOP", "never"])
        assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("say ", "stop")
        found = openai_client.chat.completions.create(model="p", messages=ASK, logprobs=True)
        assert found.choices[0].logprobs is not None
        logprobs = found.choices[0].logprobs.content or []
    assert [(each.token, each.bytes, each.logprob) for each in logprobs] == [
        ("a", [97], -0.25),
        ("é", [0xC3, 0xA9], -0.25),
        ("<|im_end|>", list(b"<|im_end|>"), -0.25),
    ]


def test_without_tools_a_call_is_text(gateway: RunningGateway) -> None:
    with client(gateway.open(Script(CALLING))) as openai_client:
        found = openai_client.chat.completions.create(model="p", messages=ASK, tools=[TOOL], tool_choice="none")
    assert found.choices[0].message.tool_calls is None
    assert found.choices[0].message.content == 'I look<call>find {"key": "a"}</call>'


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"tool_choice": "required", "tools": [TOOL]}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "find"}}, "tools": [TOOL]}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"n": 0}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"top_logprobs": 2, "logprobs": True}, "top_logprobs"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"content": "no role"}]}, "messages[0].role"),
]


@pytest.mark.parametrize(("wrong", "field"), REFUSED)
def test_errors_name_the_field(gateway: RunningGateway, wrong: dict[str, Any], field: str) -> None:
    with client(gateway.open(Script())) as openai_client, pytest.raises(openai.BadRequestError) as caught:
        openai_client.chat.completions.create(**{"model": "p", "messages": ASK, **wrong})
    assert caught.value.param == field
    assert field.partition("[")[0] in caught.value.message


def test_keys(gateway: RunningGateway) -> None:
    access, other = gateway.open(Script("yes"), "1-0"), gateway.open(Script(), "1-1")
    for key in (other.key, "wrong", "é" * 3):
        with (
            client(Access(access.url, key)) as openai_client,
            pytest.raises((openai.AuthenticationError, UnicodeError)),
        ):
            openai_client.models.list()
    refused = pytest.raises(openai.AuthenticationError, match="no open episode with this key")
    with client(Access(access.url.replace("1-0", "9-9"), access.key)) as stranger, refused:
        stranger.chat.completions.create(model="p", messages=ASK)
    with client(access) as openai_client:
        assert openai_client.chat.completions.create(model="p", messages=ASK).choices
        gateway.do(gateway.server.end("1-0"))
        with pytest.raises(openai.AuthenticationError):
            openai_client.chat.completions.create(model="p", messages=ASK)


def test_models_and_what_does_not_exist(gateway: RunningGateway) -> None:
    with client(gateway.open(Script())) as openai_client:
        assert [model.id for model in openai_client.models.list()] == ["policy"]
        assert openai_client.models.retrieve("gpt-9").id == "gpt-9"
        with pytest.raises(openai.NotFoundError, match="embeddings does not exist here"):
            openai_client.embeddings.create(model="p", input="x")


def test_all_tokens_used_up(gateway: RunningGateway) -> None:
    """A loop that watches finish_reason ends; one that does not is told by an error that agents know."""
    with client(gateway.open(Script("123456789"), max_tokens=9)) as openai_client:
        found = openai_client.chat.completions.create(model="p", messages=ASK)
        assert found.choices[0].finish_reason == "length"
        messages = [*ASK, found.choices[0].message, {"role": "user", "content": "on"}]
        for _ in range(8):
            empty = openai_client.chat.completions.create(model="p", messages=messages)
            assert (empty.choices[0].message.content, empty.choices[0].finish_reason) == ("", "length")
        with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
            openai_client.chat.completions.create(model="p", messages=messages)
    assert caught.value.code == "context_length_exceeded"


def test_a_client_that_goes_away_cancels_its_call(gateway: RunningGateway) -> None:
    script = Script("done")
    access = gateway.open(script)
    script.held = True
    with client(access, timeout=0.3) as openai_client:
        with pytest.raises(openai.APITimeoutError):
            openai_client.chat.completions.create(model="p", messages=ASK)
        assert script.cancelled.wait(10)
        script.held = False
        assert openai_client.chat.completions.create(model="p", messages=ASK).choices[0].message.content == "done"
    episode = gateway.server.episode("1-0").record.trajectory()[1]
    assert (len(episode.turns), episode.wasted_tokens) == (1, 4)


def test_calls_in_flight_end_with_the_episode(gateway: RunningGateway) -> None:
    script = Script()
    script.held = True

    async def play() -> None:
        async with AsyncOpenAI(base_url=access.url, api_key=access.key) as openai_client:
            call = asyncio.create_task(openai_client.chat.completions.create(model="p", messages=ASK))
            await asyncio.to_thread(script.begun.wait)
            await asyncio.to_thread(gateway.do, gateway.server.end("1-0"))
            with pytest.raises(openai.InternalServerError, match="the episode is over") as caught:
                await call
            assert caught.value.status_code == 503

    access = gateway.open(script)
    asyncio.run(play())
    assert len(script.requests) == 1, "the client was told not to try again"


def test_calls_at_the_same_time(gateway: RunningGateway) -> None:
    async def play() -> list[str | None]:
        async with AsyncOpenAI(base_url=access.url, api_key=access.key) as openai_client:
            calls = [
                openai_client.chat.completions.create(
                    model="p", messages=[{"role": "user", "content": f"{i}"}], stream=False
                )
                for i in range(20)
            ]
            return [found.choices[0].message.content for found in await asyncio.gather(*calls)]

    access = gateway.open(Script(*["same"] * 20))
    assert asyncio.run(play()) == ["same"] * 20
    assert causes(gateway) == ["new_conversation"] * 19


def test_an_async_stream(gateway: RunningGateway) -> None:
    async def play() -> str:
        async with AsyncOpenAI(base_url=access.url, api_key=access.key) as openai_client:
            chunks = await openai_client.chat.completions.create(model="p", messages=ASK, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    access = gateway.open(Script("hello"))
    assert asyncio.run(play()) == "hello"


def test_responses(gateway: RunningGateway) -> None:
    script = Script(CALLING, "it is b", "yes")
    with client(gateway.open(script)) as openai_client:
        asked: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "go"}]}]
        first = openai_client.responses.create(model="p", instructions="be brief", input=asked, tools=[FLAT_TOOL])
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        assert (first.status, first.output_text) == ("completed", "I look")
        call = first.output[2]
        assert call.type == "function_call"
        assert (call.name, call.arguments) == ("find", '{"key": "a"}')
        told: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "b"}
        second = openai_client.responses.create(
            model="p", instructions="be brief", input=[*asked, *first.output, told], tools=[FLAT_TOOL]
        )
        assert second.output_text == "it is b"
        third = openai_client.responses.create(
            model="p", instructions="be brief", input="sure?", previous_response_id=second.id, tools=[FLAT_TOOL]
        )
        assert third.output_text == "yes"
        assert third.usage is not None
        assert third.usage.input_tokens == len(script.requests[2].tokens)
        with pytest.raises(openai.BadRequestError, match="is no response of this episode"):
            openai_client.responses.create(model="p", input="x", previous_response_id="resp_9")
    assert causes(gateway) == []
    assert decode(script.requests[2].tokens).count("be brief") == 1


def test_a_stream_of_responses(gateway: RunningGateway) -> None:
    with client(gateway.open(Script(CALLING, "cut off"))) as openai_client:
        with openai_client.responses.stream(model="p", input="go", tools=[FLAT_TOOL]) as events:
            kinds = [event.type for event in events]
            final = events.get_final_response()
        assert final.output_text == "I look"
        with openai_client.responses.create(model="p", input="go", max_output_tokens=3, stream=True) as events:
            last = list(events)[-1]
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details is not None
    assert last.response.incomplete_details.reason == "max_output_tokens"
    part = ["response.output_item.added", "response.content_part.added"]
    done = ["response.content_part.done", "response.output_item.done"]
    assert kinds == [
        "response.created", "response.in_progress",
        *part, "response.reasoning_text.delta", "response.reasoning_text.done", *done,
        *part, "response.output_text.delta", "response.output_text.done", *done,
        "response.output_item.added", "response.function_call_arguments.delta",
        "response.function_call_arguments.done", "response.output_item.done",
        "response.completed",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"input": []}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "text.format"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": ""}]}, "input[0].role"),
        ({"background": True}, "background"),
    ],
)
def test_errors_of_responses_name_the_field(gateway: RunningGateway, wrong: dict[str, Any], field: str) -> None:
    with client(gateway.open(Script())) as openai_client, pytest.raises(openai.BadRequestError) as caught:
        openai_client.responses.create(**{"model": "p", "input": "go", **wrong})
    assert caught.value.param == field


def test_logprobs_of_responses(gateway: RunningGateway) -> None:
    with client(gateway.open(Script("a"))) as openai_client:
        found = openai_client.responses.create(model="p", input="go", include=["message.output_text.logprobs"])
    [item] = found.output
    assert item.type == "message"
    assert item.content[0].type == "output_text"
    assert [each.token for each in item.content[0].logprobs or ()] == ["a", "<|im_end|>"]
