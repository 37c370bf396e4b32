"""Append to a buffer actor, and poll a reward actor, on a Ray that loses replies:
python -m tests.chaos.reply_loss DIRECTORY N."""

import asyncio
import json
import sys
from contextlib import suppress
from pathlib import Path

from actors.buffer import BufferActor
from actors.reward import RewardActor
from actors.runtime.spawn import Resources, Spawner, cluster
from asyncrl.config import Flow, Rollout, Run
from asyncrl.errors import ActorError
from asyncrl.observe.audit.audit import audit
from asyncrl.observe.audit.evidence import stored_slots
from asyncrl.types import Receipt
from tests.support.buffer_stores import payload

GROUP, POLLS = 10, 30


async def place(run: Run, directory: Path, spawner: Spawner) -> tuple[BufferActor, Path]:
    """A buffer that has given out its tickets. When a reply to either call is lost, another buffer is tried."""
    from ray.exceptions import RayActorError  # not earlier: Ray reads its environment once

    for number in range(20):
        home = directory / str(number)
        try:
            buffer = await spawner.spawn(f"buffer-{number}", Resources(cpus=0.0), BufferActor, run, home)
            if await buffer.admit(5.0):
                return buffer, home
        except (ActorError, RayActorError):
            continue
    raise TimeoutError("twenty buffers did not answer")


async def place_reward(run: Run, spawner: Spawner) -> RewardActor:
    for number in range(20):
        with suppress(ActorError):
            return await spawner.spawn(f"reward-{number}", Resources(cpus=0.0), RewardActor, run.reward)
    raise TimeoutError("twenty reward actors did not answer")


async def append_all(directory: Path, count: int, spawner: Spawner) -> dict[str, int]:
    run = Run(
        name="test-run",
        steps=1,
        max_staleness=0,
        rollout=Rollout(group_size=GROUP),
        flow=Flow(groups_per_step=count // GROUP, groups_per_take=1),
    )
    buffer, home = await place(run, directory, spawner)
    slots = [(group, sample) for group in range(count // GROUP) for sample in range(GROUP)]
    answers = await asyncio.gather(*(buffer.append([payload(*slot)]) for slot in slots))
    receipts: list[Receipt] = [receipt for [receipt] in answers]
    await buffer.close()
    reward = await place_reward(run, spawner)
    polls = [await reward.failures() for _ in range(POLLS)]
    found = audit(home, "test-run", {})
    assert found.sound, found.violations
    return {
        "acknowledged": len({receipt.slot for receipt in receipts}),
        "visible": len(stored_slots(home, "test-run")),
        "frames": found.log.frames,
        "polls": len(polls),
        "answered_duplicate": sum(receipt.status == "duplicate" for receipt in receipts),
    }


if __name__ == "__main__":
    with cluster("local", cpus=1) as local:
        result = asyncio.run(append_all(Path(sys.argv[1]), int(sys.argv[2]), local))
    Path(sys.argv[1], "result.json").write_text(json.dumps(result))  # Ray writes to the standard output as well
