"""What the user's functions fail with: told once and recorded; a function that fails on every sample ends the run."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from actors.gateway.actor import GatewayActor
from actors.reward import RewardActor
from actors.teacher import TeacherActor
from asyncrl.errors import UserCodeError
from pipelines.recording.recorder import Recorder

LOOK_S = 1.0


@asynccontextmanager
async def watching_functions(
    callers: Sequence[RewardActor | GatewayActor | TeacherActor], recorder: Recorder, directory: Path
) -> AsyncGenerator[None, None]:
    """Raise UserCodeError where a function fails always; a task group brings it to whoever runs inside."""
    known = set[tuple[str, str]]()

    async def look() -> None:
        for caller in callers:
            found = await caller.failures()
            for failure in found.first:
                if (failure.function, failure.reason) not in known:
                    known.add((failure.function, failure.reason))
                    recorder.function_failed(failure)
            if found.always:
                raise UserCodeError(f"{found.always}\n  when mended   asyncrl resume {directory}")

    async def watch() -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await look()

    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch())
        yield
        watching.cancel()
        await look()
