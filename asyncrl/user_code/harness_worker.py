"""The child that plays episodes: `python -m asyncrl.user_code.harness_worker module:function`.

Many at a time: an async function as tasks of one event loop, any other in a thread each. Frames are those of
`asyncrl.user_code.worker`. A task comes as `Task` and is answered by an `Ended`; a text names an episode to be
cancelled, which a thread cannot be.
"""

import asyncio
import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec

from asyncrl.system.user_functions import find_function
from asyncrl.user_code.agents import Outcome, Task, outcome
from asyncrl.user_code.protocol import RewardFailure, attempt
from asyncrl.user_code.worker import HEADER, answer, die_with_parent, private_pipes


class Ended(msgspec.Struct, frozen=True, array_like=True):
    episode: str
    outcome: Outcome | RewardFailure


def main(location: str) -> None:
    requests, answers = private_pipes()
    threading.Thread(target=die_with_parent, args=(requests.fileno(),), daemon=True).start()
    function = attempt("agent", find_function, location)  # importing runs the user's code
    answer(answers, function if isinstance(function, RewardFailure) else None)
    if not isinstance(function, RewardFailure):
        asyncio.run(_serve(requests, answers, function))


async def _serve(requests: BinaryIO, answers: BinaryIO, function: Callable[..., Any]) -> None:
    loop, playing, one_at_a_time = asyncio.get_running_loop(), dict[str, asyncio.Task[None]](), threading.Lock()
    decoder = msgspec.msgpack.Decoder(Task | str)
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))

    def end(task: Task, value: Any) -> None:
        found = value if isinstance(value, RewardFailure) else outcome(value)
        with one_at_a_time:
            answer(answers, Ended(task.episode, found))

    async def play(task: Task) -> None:
        try:
            end(task, await attempt_async(function, task))
        finally:
            playing.pop(task.episode, None)

    def play_in_thread(task: Task) -> None:
        end(task, attempt("agent", function, task.prompt, task.answer, task.access))

    def begin(given: Task | str) -> None:
        if isinstance(given, str):
            if (task := playing.get(given)) is not None:
                task.cancel()
        elif is_async:
            playing[given.episode] = asyncio.create_task(play(given))
        else:
            threading.Thread(target=play_in_thread, args=(given,), name=given.episode, daemon=True).start()

    def read() -> None:
        while header := requests.read(HEADER.size):
            loop.call_soon_threadsafe(begin, decoder.decode(requests.read(HEADER.unpack(header)[0])))

    await asyncio.to_thread(read)


async def attempt_async(function: Callable[..., Any], task: Task) -> Any:
    from asyncrl.drop_reasons import DropReason
    from asyncrl.user_code.protocol import describe

    try:
        return await function(task.prompt, task.answer, task.access)
    except Exception as error:  # the user's code may raise anything
        return RewardFailure(DropReason.AGENT_ERROR, describe(error))


if __name__ == "__main__":
    main(sys.argv[1])
