"""Runs a pipeline in a thread where an event loop is running already, as in a notebook; an interrupt still ends it."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def in_a_loop() -> bool:
    """Whether this thread has a running event loop, so that no other can run in it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def run_in_thread(call: Callable[[], T]) -> T:
    """The result of a call in a thread of its own; a KeyboardInterrupt here becomes one there."""
    thread = _Thread(call)
    thread.start()
    while True:
        try:
            thread.over.wait()  # not `join`, which an interrupt makes believe that the thread has ended
        except KeyboardInterrupt:
            thread.interrupt()
        else:
            return thread.result()


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """As asyncio.run, also in the thread of `run_in_thread`, where no signal arrives."""
    thread = threading.current_thread()
    return thread.run_loop(work) if isinstance(thread, _Thread) else asyncio.run(work)


class _Thread(threading.Thread, Generic[T]):
    def __init__(self, call: Callable[[], T]) -> None:
        super().__init__(name="run", daemon=True)
        self._call = call
        self.over = threading.Event()
        self._outcome: list[T] = []
        self._error: BaseException | None = None
        self._interrupted = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None

    def run(self) -> None:
        try:
            self._outcome.append(self._call())
        except BaseException as error:  # all of it belongs to whoever waits for the thread
            self._error = error
        finally:
            self.over.set()

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._outcome[0]

    def interrupt(self) -> None:
        self._interrupted = True
        if self._loop is not None and self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)

    def run_loop(self, work: Coroutine[Any, Any, Any]) -> Any:
        async def guarded() -> Any:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            try:
                if self._interrupted:
                    work.close()
                    raise asyncio.CancelledError
                return await work
            finally:
                self._loop = None

        try:
            return asyncio.run(guarded())
        except asyncio.CancelledError:
            if self._interrupted:
                raise KeyboardInterrupt from None
            raise
