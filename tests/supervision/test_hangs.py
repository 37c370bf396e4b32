"""What hangs without any process being stopped, in a run inside the test's own process."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from actors.rollout.actor import RolloutActor
from actors.runtime.spawn import InProcess
from asyncrl.errors import EndOfDataError, first_cause
from asyncrl.types import Prompt, Slot
from pipelines import train
from pipelines.recording.recorder import Recorder
from tests.support.watched_run import Telling, play, small, until

LIMIT = "flow.stall_timeout_s=4"
LATE_S = 20.0
"""Past its limit a stall is explained within this, on a machine that is busy with other things."""
HANGING = """
import time
from pathlib import Path

def reward(prompt, completion, answer):
    while Path({flag!r}).exists():
        time.sleep(0.1)
    return float(len(completion) % 2)
"""


def _rollout(watchdog: Telling) -> Any:
    actor = watchdog._calls.actors["rollout-0"]
    assert isinstance(actor, RolloutActor)
    return actor


async def _explained(watchdog: Telling) -> str:
    began = time.monotonic()
    found = await watchdog.next()
    assert time.monotonic() - began < 4 + LATE_S
    print(found.sentence)
    assert "\n" not in found.sentence
    return found.sentence


def test_a_reward_function_that_hangs(tmp_path: Path, model: Path) -> None:
    flag, file = tmp_path / "hang", tmp_path / "judge.py"
    file.write_text(HANGING.format(flag=str(flag)))

    async def scenario(watchdog: Telling, recorder: Recorder) -> None:
        await until(lambda: len(recorder.rows) > 1)
        flag.touch()
        sentence = await _explained(watchdog)
        assert sentence.startswith("trainer waits for group ")
        assert f"for its reward, the reward function {file}:reward (process " in sentence
        assert "of the 500 s that it may take" in sentence
        assert "judge.py:7" in (tmp_path / "run" / "stall.txt").read_text() or not _can_spy(tmp_path)
        flag.unlink()
        steps = len(recorder.rows)
        await until(lambda: len(recorder.rows) > steps)

    run = small(tmp_path, model, LIMIT, f"reward.function={file}:reward", "reward.timeout_s=500")
    play(run, model, InProcess(), scenario)


def _can_spy(root: Path) -> bool:
    return "(py-spy" not in (root / "run" / "stall.txt").read_text()


def test_a_reward_function_that_is_killed_again_and_again(tmp_path: Path, model: Path) -> None:
    """Nothing hangs: every group is dropped."""
    flag, file = tmp_path / "hang", tmp_path / "judge.py"
    file.write_text(HANGING.format(flag=str(flag)))

    async def scenario(watchdog: Telling, recorder: Recorder) -> None:
        await until(lambda: len(recorder.rows) > 1)
        flag.touch()
        sentence = await _explained(watchdog)
        assert sentence.startswith("trainer waits for its next groups: ")
        assert "samples were dropped since the last progress (" in sentence
        assert "reward_timeout" in sentence
        assert f"so look at the reward function {file}:reward" in sentence

    run = small(tmp_path, model, LIMIT, f"reward.function={file}:reward", "reward.timeout_s=0.2", "reward.workers=2")
    play(run, model, InProcess(), scenario)


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_publication_that_hangs(staleness: int, tmp_path: Path, model: Path) -> None:
    async def scenario(watchdog: Telling, recorder: Recorder) -> None:
        await until(lambda: len(recorder.rows) > 1)
        engine = _rollout(watchdog)._engine
        goes_on, load = asyncio.Event(), engine.load_weights

        async def hangs(*arguments: Any) -> Any:
            await goes_on.wait()
            return await load(*arguments)

        engine.load_weights = hangs
        sentence = await _explained(watchdog)
        assert "rollout-0 has not acknowledged the new version for " in sentence
        assert "it has been at it for " in sentence
        assert "(loading version " in sentence
        goes_on.set()
        steps = len(recorder.rows)
        await until(lambda: len(recorder.rows) > steps)

    play(small(tmp_path, model, LIMIT, f"max_staleness={staleness}"), model, InProcess(), scenario)


def test_a_group_member_that_is_lost(tmp_path: Path, model: Path) -> None:
    """The rollout actor believes that it is done with the sample; the deadline of its group lets the run go on."""

    async def scenario(watchdog: Telling, recorder: Recorder) -> None:
        await until(lambda: len(recorder.rows) > 1)
        rollout = _rollout(watchdog)
        sample, lost = rollout._sample, list[Slot]()

        async def loses(slot: Slot, *arguments: Any) -> None:
            if slot.sample == 2 and not lost:
                lost.append(slot)
            else:
                await sample(slot, *arguments)

        rollout._sample = loses
        sentence = await _explained(watchdog)
        assert sentence == (
            f"trainer waits for group {lost[0].group}: sample 2 was sent to rollout-0, which says that it is done: it "
            "was lost, its group ends flow.group_timeout_s=12 s after admission"
        )
        steps = len(recorder.rows)
        await until(lambda: len(recorder.rows) > steps)

    play(small(tmp_path, model, LIMIT, "flow.group_timeout_s=12", "max_staleness=0"), model, InProcess(), scenario)


def test_an_engine_that_makes_no_step(tmp_path: Path, model: Path) -> None:
    async def scenario(watchdog: Telling, recorder: Recorder) -> None:
        await until(lambda: len(recorder.rows) > 1)
        engine = _rollout(watchdog)._engine
        await engine.pause()
        sentence = await _explained(watchdog)
        if sentence.startswith("the run waits for a publication: "):  # the trainer had groups for one step more
            assert "rollout-0 has not acknowledged the new version" in sentence
        else:
            assert sentence.startswith("trainer waits for group ")
            assert " has been in generation on rollout-0 for " in sentence
            assert "its engine (" in sentence
        await engine.resume()

    play(small(tmp_path, model, LIMIT), model, InProcess(), scenario)


def test_prompts_that_end(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Two:
        def prompt(self, split: str, index: int) -> Prompt:
            return [Prompt(uid="a", text="1+1="), Prompt(uid="b", text="2+2=")][index]

    async def scenario(watchdog: Telling, recorder: Recorder) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(train, "make_task", lambda *_: Two())
    with pytest.raises(ExceptionGroup) as error:
        play(small(tmp_path, model, "steps=5"), model, InProcess(), scenario)
    cause = first_cause(error.value)
    assert isinstance(cause, EndOfDataError)
    assert "the prompts have ended: the task has no train prompt 2" in str(cause)
    assert "steps=5 of 4 groups take 20 at least" in str(cause)
