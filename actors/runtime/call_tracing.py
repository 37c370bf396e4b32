"""Which calls of the driver are in progress. A pipeline cannot tell a traced actor from another one."""

import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, cast

from actors.runtime.spawn import ActorWrapper, Resources, Spawner, unwrap
from asyncrl.observe.diagnosis.snapshot import Call
from asyncrl.types import Ticket

P = ParamSpec("P")
T = TypeVar("T")
REMEMBERED = 256
"""Finished calls that are kept."""
Ended = Callable[[str, str], None]


class CallTrace:
    """The calls in progress. Written by the event loop, read by the watchdog's thread: every read copies atomically."""

    def __init__(self, ended: Ended) -> None:
        """`ended` is called with the actor and the method of each call that returned a result."""
        self._ended = ended
        self._open: dict[object, tuple[str, str, float, tuple[Any, ...]]] = {}
        self.actors: dict[str, object] = {}
        """Every actor that was spawned, by name."""
        self._returned: deque[tuple[str, tuple[Any, ...]]] = deque(maxlen=REMEMBERED)

    @contextmanager
    def in_progress(self, actor: str, method: str, args: tuple[Any, ...] = ()) -> Generator[None, None, None]:
        key = object()
        self._open[key] = actor, method, time.monotonic(), args
        try:
            yield
        finally:
            del self._open[key]
        if method == "generate":
            self._returned.append((actor, args))
        self._ended(actor, method)

    @property
    def open(self) -> tuple[Call, ...]:
        """Oldest first."""
        now = time.monotonic()
        return tuple(
            Call(actor=actor, method=method, seconds=now - since, slots=tuple(_slots(args)))
            for actor, method, since, args in self._open.copy().values()
        )

    def returned(self, group: int) -> str | None:
        """The actor whose call with the group returned last."""
        for actor, args in reversed(self._returned.copy()):
            if any(found == group for found, _ in _slots(args)):
                return actor
        return None


def _slots(value: Any) -> Generator[tuple[int, int], None, None]:
    """Samples of the tickets among the arguments."""
    if isinstance(value, Ticket):
        yield from ((value.group, sample) for sample in value.samples)
    elif isinstance(value, list | tuple):
        for item in cast("list[Any]", value):
            yield from _slots(item)


class TracedActor(ActorWrapper):
    """An actor whose calls are traced."""

    def __init__(self, name: str, actor: object, calls: CallTrace) -> None:
        super().__init__(actor)
        self._name = name
        self._calls = calls

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return unwrap, (self.wrapped,)

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)
        called = getattr(self.wrapped, method)

        async def call(*args: Any, **kwargs: Any) -> Any:
            with self._calls.in_progress(self._name, method, args):
                return await called(*args, **kwargs)

        return call


class TracingSpawner:
    """Spawns traced actors."""

    def __init__(self, spawner: Spawner, calls: CallTrace) -> None:
        self._spawner = spawner
        self._calls = calls

    async def spawn(
        self, name: str, resources: Resources, cls: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        given = [unwrap(argument) for argument in args]
        named = {key: unwrap(argument) for key, argument in kwargs.items()}
        make = cast(Callable[..., T], cls)
        with self._calls.in_progress(name, "spawn"):
            actor = await self._spawner.spawn(name, resources, make, *given, **named)
        self._calls.actors[name] = actor
        return cast(T, TracedActor(name, actor, self._calls))

    async def gang(self, each: Resources, members: int, timeout_s: float) -> list[Resources]:
        return await self._spawner.gang(each, members, timeout_s)

    def end(self, actor: object) -> None:
        self._calls.actors = {name: each for name, each in self._calls.actors.items() if each is not unwrap(actor)}
        self._spawner.end(unwrap(actor))

    def clear(self) -> None:
        self._calls.actors.clear()
        self._spawner.clear()
