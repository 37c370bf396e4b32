"""The example of the OpenAI Agents SDK, in an episode through a real gateway."""

import asyncio

from agents import Agent, OpenAIResponsesModel, Runner
from openai import AsyncOpenAI

from asyncrl.user_code.agents import Access
from examples import openai_agents
from tests.support.gateways import Script, running_gateway


def test_its_tool_calls_and_replies_are_one_line_of_tokens() -> None:
    script = Script('<call>add {"a": 2, "b": 3}</call>', "it is 5")
    with running_gateway() as gateway:
        access = gateway.open(script)
        assert asyncio.run(openai_agents.agent("2+3=", "5", access)) == "it is 5"
        _, episode = gateway.do(gateway.server.end("1-0")).trajectory()
    assert [turn.tool_calls for turn in episode.turns] == [1, 0]
    assert not episode.branches
    assert not script.replies


def test_so_are_they_through_the_responses_api() -> None:
    async def agent(access: Access) -> str:
        async with AsyncOpenAI(base_url=access.url, api_key=access.key) as client:
            model = OpenAIResponsesModel(model=access.model, openai_client=client)
            solver = Agent(name="solver", model=model, tools=[openai_agents.add])
            return str((await Runner.run(solver, "2+3=", run_config=openai_agents.OFFLINE)).final_output)

    script = Script('<call>add {"a": 2, "b": 3}</call>', "it is 5")
    with running_gateway() as gateway:
        assert asyncio.run(agent(gateway.open(script))) == "it is 5"
        _, episode = gateway.do(gateway.server.end("1-0")).trajectory()
    assert [turn.tool_calls for turn in episode.turns] == [1, 0]
    assert not episode.branches
