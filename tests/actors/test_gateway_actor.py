"""Episodes between real actors in one process, with the real engine, harness processes and HTTP."""

import asyncio
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from actors.gateway.actor import GatewayActor, Play
from asyncrl.errors import WeightSyncError
from asyncrl.types import GIVEN, Probe, Prompt, Sampling, SendOrder, Slot, Trajectory
from tests.actors.test_publisher import model  # pyright: ignore[reportUnusedImport]
from tests.support.agents import PROMPT, Played, agent_run, playing, with_limits, write_harness

__all__ = ["model"]


@pytest.fixture
def harness(tmp_path: Path) -> Path:
    return write_harness(tmp_path)


def _whole(trajectory: Trajectory) -> None:
    """What holds of every episode."""
    episode = trajectory.episode
    assert episode is not None
    sampled = {i for i, version in enumerate(trajectory.versions.tolist()) if version != GIVEN}
    assert sampled == {i for turn in episode.turns for i in range(turn.start, turn.stop)}
    assert episode.model_s > 0


@pytest.mark.parametrize("function", ["two_turns", "as_a_task"])
def test_episodes_are_played_scored_and_stored(model: Path, tmp_path: Path, harness: Path, function: str) -> None:
    async def scenario() -> dict[Slot, Trajectory]:
        async with playing(agent_run(model, harness, function), model, tmp_path) as at:
            await at.generate(await at.tickets(2))
            assert not at.gateway._episodes
            return await at.trained(2)

    found = asyncio.run(scenario())
    assert len(found) == 4
    for trajectory in found.values():
        _whole(trajectory)
        assert trajectory.episode is not None
        assert len(trajectory.episode.turns) == 2
        assert trajectory.episode.branches == ()
        assert trajectory.reward == 3 + 1  # the reward function saw turn, what was said, turn
        assert trajectory.episode.turns[0].stop - trajectory.episode.turns[0].start <= 8
        assert (trajectory.finish, trajectory.engine, trajectory.prompt) == ("stop", "rollout-0", "p")
    assert len({t.tokens.tobytes() for t in found.values()}) == 4  # each sample has a random stream of its own


def test_the_harness_gives_the_reward_itself_and_those_of_turns(model: Path, tmp_path: Path, harness: Path) -> None:
    async def scenario() -> dict[Slot, Trajectory]:
        async with playing(agent_run(model, harness, "outcome"), model, tmp_path) as at:
            await at.generate(await at.tickets(1))
            return await at.trained(1)

    for trajectory in asyncio.run(scenario()).values():
        assert trajectory.reward == 0.75
        assert trajectory.parts == {"right": 0.5, "style": 0.25}
        assert trajectory.episode is not None
        assert [turn.reward for turn in trajectory.episode.turns] == [0.0, 1.0]


def test_another_conversation_is_a_branch(model: Path, tmp_path: Path, harness: Path) -> None:
    async def scenario() -> dict[Slot, Trajectory]:
        async with playing(agent_run(model, harness, "branches"), model, tmp_path) as at:
            await at.generate(await at.tickets(1))
            return await at.trained(1)

    for trajectory in asyncio.run(scenario()).values():
        assert trajectory.episode is not None
        assert [(each.after, each.cause) for each in trajectory.episode.branches] == [(-1, "new_conversation")]


def test_the_tokens_of_an_episode_are_bounded(model: Path, tmp_path: Path, harness: Path) -> None:
    async def scenario() -> dict[Slot, Trajectory]:
        run = with_limits(agent_run(model, harness, "many_turns"), max_tokens=40)
        async with playing(run, model, tmp_path) as at:
            await at.generate(await at.tickets(1))
            return await at.trained(1)

    for trajectory in asyncio.run(scenario()).values():
        assert trajectory.finish == "length"
        assert sum(map(len, trajectory.segments[1:])) <= 40


@pytest.mark.parametrize(
    ("function", "reason", "wasted"),
    [
        ("silent", "agent_invalid", False),
        ("raises", "agent_error", True),
        ("slow", "agent_timeout", True),
        ("wrong_turn_rewards", "agent_invalid", True),
    ],
)
def test_what_goes_wrong_is_dropped_and_counted(
    model: Path,
    tmp_path: Path,
    harness: Path,
    function: str,
    reason: str,
    wasted: bool,
) -> None:
    async def scenario() -> None:
        async with playing(agent_run(model, harness, function, timeout_s=6.0), model, tmp_path) as at:
            await at.generate(await at.tickets(1))
            ledger = await at.buffer.ledger()
            assert ledger.dropped == {reason: 1, "group_incomplete": 1}
            assert ledger.balanced
            assert bool((await at.buffer.waste()).get(reason)) == wasted
            assert not at.gateway._episodes
            [told] = (await at.gateway.failures()).first  # of two that went wrong
            assert (told.reason, told.function) == (reason, f"{harness}:{function}")

    asyncio.run(scenario())


def test_a_group_out_of_time_ends_its_episodes(model: Path, tmp_path: Path, harness: Path) -> None:
    async def scenario() -> None:
        run = agent_run(model, harness, "slow")
        run = msgspec.structs.replace(run, flow=msgspec.structs.replace(run.flow, group_timeout_s=1.0))
        async with playing(run, model, tmp_path) as at:
            await at.generate(await at.tickets(1))
            assert (await at.buffer.ledger()).dropped == {"timeout": 1, "group_incomplete": 1}

    asyncio.run(scenario())


def test_another_engine_may_take_over_at_any_moment(model: Path, tmp_path: Path, harness: Path) -> None:
    """Also before the harness was begun, and while the episode ends at its deadline."""

    async def scenario() -> None:
        gateway = GatewayActor(agent_run(model, harness, "slow"), model)
        await gateway.start()
        play = Play(PROMPT, Sampling(max_tokens=8), seed=0, deadline=time.time() + 1.0)
        playing = [asyncio.create_task(gateway.play("e.0", "0.0", play))]
        await asyncio.sleep(0)
        while not gateway._episodes["0.0"].over.done():
            playing.append(asyncio.create_task(gateway.play(f"e.{len(playing)}", "0.0", play)))
            at_an_edge = len(playing) < 20 or time.time() > play.deadline - 0.05
            await asyncio.sleep(0 if at_an_edge else 0.02)
        *moved, last = await asyncio.gather(*playing)
        assert set(moved) <= {None, last}
        assert last is not None
        assert last.failure is not None
        assert last.failure.reason == "timeout"
        await gateway.close()

    asyncio.run(scenario())


def test_a_later_deadline_is_that_of_the_engine_that_plays(model: Path, tmp_path: Path, harness: Path) -> None:
    """It takes an episode over before its harness was begun."""

    async def scenario() -> None:
        gateway = GatewayActor(agent_run(model, harness, "silent"), model)
        await gateway.start()
        over = Play(PROMPT, Sampling(max_tokens=8), seed=0, deadline=time.time() - 1.0)
        first = asyncio.create_task(gateway.play("e.0", "0.0", over))
        second = asyncio.create_task(
            gateway.play("e.1", "0.0", msgspec.structs.replace(over, deadline=time.time() + 1000))
        )
        played = await second
        assert await first is None
        assert played is not None
        assert played.failure is not None
        assert played.failure.reason == "agent_invalid"
        await gateway.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("cluster", ["inprocess", "local"])
def test_nobody_beyond_this_machine_can_call_it(model: Path, tmp_path: Path, harness: Path, cluster: str) -> None:
    async def scenario() -> list[str]:
        run = msgspec.structs.replace(agent_run(model, harness, "silent"), cluster=cluster)
        before = _listening()
        gateway = GatewayActor(run, model)
        await gateway.start()
        try:
            while not (found := _listening() - before):  # noqa: ASYNC110  (of the kernel)
                await asyncio.sleep(0.01)
            return [ip for ip, _ in found]
        finally:
            await gateway.close()

    assert asyncio.run(scenario()) == ["127.0.0.1"]


def _listening() -> set[tuple[str, int]]:
    """By this process."""
    return {c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}


async def _sampling(at: Played, engine: int, tokens: int = 3) -> None:
    """Until the engine has calls at work."""
    end = time.monotonic() + 30
    while not at.rollouts[engine]._engine.stats().running:
        assert time.monotonic() < end
        await asyncio.sleep(0)
    before = at.rollouts[engine]._engine.stats().generated_tokens
    while at.rollouts[engine]._engine.stats().generated_tokens < before + tokens:  # noqa: ASYNC110  (a counter)
        await asyncio.sleep(0)


def _tokens(found: dict[Slot, Trajectory]) -> dict[Slot, list[int]]:
    return {slot: trajectory.tokens.tolist() for slot, trajectory in found.items()}


def test_an_engine_that_leaves_hands_its_calls_over_in_the_middle(model: Path, tmp_path: Path, harness: Path) -> None:
    """The same tokens as without: each call goes on from where it was, and no harness is asked twice."""

    async def scenario(directory: Path, *, leave: bool) -> dict[Slot, Trajectory]:
        async with playing(agent_run(model, harness, "two_turns"), model, directory) as at:
            tickets = await at.tickets(2)
            generating = at.generate(tickets)
            if leave:
                await _sampling(at, 0)
                open_before = {name: found.playing for name, found in at.gateway._episodes.items()}
                await at.rollouts[0].drain()
                await generating
                assert (await at.rollouts[0].stats()).running == 0
                missing, _ = await at.buffer.reassign([ticket.group for ticket in tickets])
                generating = at.generate(missing, 1)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                assert all(at.gateway._episodes[name].playing is task for name, task in open_before.items())
            await generating
            return await at.trained(2)

    whole = asyncio.run(scenario(tmp_path / "a", leave=False))
    moved = asyncio.run(scenario(tmp_path / "b", leave=True))
    assert _tokens(whole) == _tokens(moved)
    assert {trajectory.engine for trajectory in moved.values()} == {"rollout-1"}


def test_an_engine_that_died_is_replaced_in_the_middle_of_a_call(model: Path, tmp_path: Path, harness: Path) -> None:
    """As seen from the gateway: one engine goes silent, another asks for the same slots."""

    async def scenario(directory: Path, *, die: bool) -> dict[Slot, Trajectory]:
        async with playing(agent_run(model, harness, "two_turns"), model, directory) as at:
            tickets = await at.tickets(2)
            generating = at.generate(tickets)
            if die:
                await _sampling(at, 0)
                episodes = at.rollouts[0]._episodes
                assert episodes is not None
                episodes._gateway.answer = lost  # pyright: ignore[reportAttributeAccessIssue]
                generating.cancel()
                await asyncio.gather(generating, return_exceptions=True)
                del episodes._gateway.answer
                await episodes.close()
                missing, _ = await at.buffer.reassign([ticket.group for ticket in tickets])
                generating = at.generate(missing, 1)
            await generating
            return await at.trained(2)

    async def lost(_: object) -> None: ...

    whole = asyncio.run(scenario(tmp_path / "a", die=False))
    assert _tokens(whole) == _tokens(asyncio.run(scenario(tmp_path / "b", die=True)))


def test_an_episode_that_had_ended_is_not_played_again(model: Path, tmp_path: Path, harness: Path) -> None:
    """Its engine died before it could deliver it."""

    async def scenario() -> None:
        async with playing(agent_run(model, harness, "two_turns"), model, tmp_path) as at:
            tickets, submit = await at.tickets(1), at.rollouts[0]._delivery.submit

            async def never(*_: object) -> None:
                await asyncio.Event().wait()

            at.rollouts[0]._delivery.submit = never  # pyright: ignore[reportAttributeAccessIssue]
            generating = at.generate(tickets)
            while len(at.gateway._episodes) < 2:  # noqa: ASYNC110  (a dictionary)
                await asyncio.sleep(0)
            await asyncio.wait([found.over for found in at.gateway._episodes.values()])
            generating.cancel()
            await asyncio.gather(generating, return_exceptions=True)
            sampled = sum(rollout._engine.stats().generated_tokens for rollout in at.rollouts)
            await at.generate(tickets, 1)
            assert len(await at.trained(1)) == 2
            assert sum(rollout._engine.stats().generated_tokens for rollout in at.rollouts) == sampled
            at.rollouts[0]._delivery.submit = submit

    asyncio.run(scenario())


def test_a_client_that_goes_away_frees_the_engine(model: Path, tmp_path: Path, harness: Path) -> None:
    async def scenario() -> dict[Slot, Trajectory]:
        run = with_limits(agent_run(model, harness, "gives_up"), max_tokens=240)
        async with playing(run, model, tmp_path) as at:
            ticket = msgspec.structs.replace((await at.tickets(1))[0], samples=(0,))
            engine = at.rollout._engine
            submit = engine.submit

            def endless(request):  # pyright: ignore[reportUnknownParameterType, reportMissingParameterType]
                if request.id.startswith("0.0/0#"):
                    request = msgspec.structs.replace(
                        request, sampling=msgspec.structs.replace(request.sampling, stop=())
                    )
                return submit(request)

            engine.submit = endless
            prompt = Prompt(uid="p", text="3+4=", answer="0.02")
            await at.generate([ticket], prompt=prompt)
            assert engine.stats().running == 0
            await at.generate([msgspec.structs.replace(ticket, samples=(1,))], prompt=prompt)
            return await at.trained(1)

    trajectory = asyncio.run(scenario())[Slot(0, 0)]
    assert trajectory.episode is not None
    assert len(trajectory.episode.turns) == 1
    assert 0 < trajectory.episode.wasted_tokens < 240


def test_held_out_prompts_are_played_too(model: Path, tmp_path: Path, harness: Path) -> None:
    async def scenario() -> None:
        async with playing(agent_run(model, harness, "two_turns"), model, tmp_path) as at:
            prompts = [msgspec.structs.replace(PROMPT, text=f"{n}+4=") for n in range(3)]
            greedy = await at.rollout.evaluate(prompts, greedy=True, seed=0)
            assert greedy == await at.rollouts[1].evaluate(prompts, greedy=True, seed=1)  # no seed in it
            assert [judged.reward for judged in greedy] == [4.0] * 3
            assert (await at.buffer.ledger()).leased == 0
            assert at.rollout.situation().evaluated == 3
            assert not at.gateway._episodes

    asyncio.run(scenario())


def test_tokens_leave_when_their_version_has_passed_its_probe(model: Path, tmp_path: Path, harness: Path) -> None:
    """What a bad version sampled never reaches a harness: it is sampled again, by the version before it."""

    async def scenario() -> dict[Slot, Trajectory]:
        run = with_limits(agent_run(model, harness, "two_turns"), max_tokens=200)
        async with playing(run, model, tmp_path) as at:
            sound = await at.trainer.export_weights(SendOrder())
            for rollout in at.rollouts:
                await rollout.load_weights(sound)
            probe = Probe(((1, 2),), (5.0,), 1e-3)  # no log-probability is 5
            bad = msgspec.structs.replace(sound, version=1, probe=probe)
            generating = at.generate(await at.tickets(1))
            await _sampling(at, 0)
            with pytest.raises(WeightSyncError, match="does not compute what the trainer does"):
                await at.rollout.load_weights(bad)
            await generating
            return await at.trained(1)

    found = asyncio.run(scenario())
    assert {version for t in found.values() for version in t.versions.tolist()} == {GIVEN, 0}
    assert any(t.episode is not None and t.episode.wasted_tokens for t in found.values())


def test_updates_in_the_middle_of_an_episode(model: Path, tmp_path: Path, harness: Path) -> None:
    async def scenario() -> dict[Slot, Trajectory]:
        run = with_limits(agent_run(model, harness, "two_turns"), max_tokens=200)
        async with playing(run, model, tmp_path) as at:
            weights = await at.trainer.export_weights(SendOrder())
            await at.rollout.load_weights(weights)
            generating = at.generate(await at.tickets(1))
            for version in range(1, 4):
                await _sampling(at, 0, 1)
                await at.rollout.load_weights(msgspec.structs.replace(weights, version=version))
            await generating
            return await at.trained(1)

    found = asyncio.run(scenario())
    for trajectory in found.values():
        _whole(trajectory)
        versions = [version for version in trajectory.versions.tolist() if version != GIVEN]
        assert versions == sorted(versions)
    assert len({version for t in found.values() for version in t.versions.tolist()}) > 2


@pytest.mark.slow
def test_500_episodes_at_a_time_on_one_engine(model: Path, tmp_path: Path, harness: Path) -> None:
    """All of them open at once, and nothing of them is left afterwards."""

    async def scenario() -> None:
        run = agent_run(model, harness, "patient", concurrency=500)
        run = with_limits(run, group_size=500)
        async with playing(run, model, tmp_path) as at:
            generating = at.generate(await at.tickets(1))
            most = 0
            while not generating.done():
                most = max(most, at.gateway._pool.playing)
                await asyncio.sleep(0.05)
            await generating
            assert most == 500
            assert len(await at.trained(1)) == 500
            calls = at.gateway._calls
            left = len(at.gateway._episodes), len(calls._episodes), len(calls._given), at.gateway._pool.playing
            assert left == (0, 0, 0, 0)

    asyncio.run(scenario())
