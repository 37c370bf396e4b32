"""The child that plays episodes: `python -m asyncrl.user_code.harness_worker module:function`, or `"" WORD ...` for
the words of a program.

Many at a time: an async function as tasks of one event loop, any other in a thread each. The parent sends a `Task`, or
the name of an episode to be cancelled, which a thread cannot be. It hears of each episode that has `Ended`, and gets
each name back when the event loop has come to cancel it.
"""

import asyncio
import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from asyncrl.system.user_functions import find_function
from asyncrl.user_code.agents import Ended, Task, failure, play, read_outcome
from asyncrl.user_code.programs import Program
from asyncrl.user_code.protocol import RewardFailure, attempt, describe
from asyncrl.user_code.worker import answer, connect, frames


def main(location: str, command: Sequence[str]) -> None:
    program = Program(command)
    requests, answers = connect(program.kill_all)
    function = attempt("agent", find_function, location) if location else program.found()  # importing runs their code
    answer(answers, function if isinstance(function, RewardFailure) else None)
    if not isinstance(function, RewardFailure):
        asyncio.run(_Episodes(answers, function).serve(requests))


class _Episodes:
    def __init__(self, answers: BinaryIO, function: Callable[..., Any]) -> None:
        self._answers, self._function = answers, function
        called: Any = getattr(function, "__call__", None)  # noqa: B004  (of an object that can be called)
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)
        self._playing: dict[str, asyncio.Task[None]] = {}
        self._one_at_a_time = threading.Lock()

    async def serve(self, requests: BinaryIO) -> None:
        loop = asyncio.get_running_loop()

        def read() -> None:
            for given in frames(requests, Task | str):
                loop.call_soon_threadsafe(self._begin, given)

        await asyncio.to_thread(read)

    def _begin(self, given: Task | str) -> None:
        if isinstance(given, str):
            self._tell(given)
            if (playing := self._playing.get(given)) is not None:
                playing.cancel()
        elif self._is_async:
            self._playing[given.episode] = asyncio.create_task(self._play(given))
        else:
            threading.Thread(target=self._play_in_thread, args=(given,), name=given.episode, daemon=True).start()

    async def _play(self, task: Task) -> None:
        result: Any = failure("it was cancelled")
        try:
            result = read_outcome(await self._function(task.prompt, task.answer, task.access))
        except Exception as error:  # the user's code may raise anything
            result = failure(*describe(error))
        except SystemExit as end:
            result = failure(f"it called sys.exit({end.code!r})")
        finally:
            self._playing.pop(task.episode, None)
            self._tell(Ended(task.episode, result))

    def _play_in_thread(self, task: Task) -> None:
        self._tell(Ended(task.episode, play(self._function, task)))

    def _tell(self, what: Ended | str) -> None:
        with self._one_at_a_time:
            answer(self._answers, what)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
