"""Runs plain classes as actors, on Ray or in process.

A class is written once, with async methods; `InProcess` builds it here, `OnRay` builds it in a process of its own and
returns a proxy with the same awaitable methods, so a pipeline cannot tell them apart and pyright checks both alike.
"""

import asyncio
import gc
import logging
import os
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from actors.runtime import auth
from actors.runtime.attach import attached
from actors.runtime.resources import Resources, options, release, reserve
from asyncrl.errors import ActorError, AsyncRLError
from asyncrl.system import install_guard, minimum_versions
from asyncrl.system.run_directory import OWNER_ONLY

P = ParamSpec("P")
T = TypeVar("T")
ACTOR_CONCURRENCY = 100_000
"""CallTrace one actor may have under way: each is a coroutine, and most of them only wait."""
ASIDE = "aside"
"""A thread of each actor's process that answers while its event loop computes or hangs."""
GARBAGE = (50_000, 20, 50)
"""An actor holds thousands of answers under way, each of many objects and none of them garbage. With Python's own
thresholds (700, 10, 10) to look at them again and again takes a third of a rollout actor's time."""


class Spawner(Protocol):
    """Where actors come from."""

    async def spawn(
        self, name: str, resources: Resources, cls: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...

    async def gang(self, each: Resources, members: int, timeout_s: float) -> list[Resources]:
        """Places for actors that are of use only together, held until `clear`: what each is to be spawned with."""
        ...

    def end(self, actor: object) -> None:
        """End one actor for good, whatever it does."""
        ...

    def clear(self) -> None:
        """End every actor that is left."""
        ...


class InProcess:
    """Every actor lives in the caller's event loop: for tests, notebooks and debuggers."""

    async def spawn(
        self, name: str, resources: Resources, cls: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        return cls(*args, **kwargs)

    async def gang(self, each: Resources, members: int, timeout_s: float) -> list[Resources]:
        return [each] * members

    def end(self, actor: object) -> None: ...

    def clear(self) -> None: ...


class OnRay:
    """Every actor is a Ray actor. Ray retries only what is repeatable: a retried call is applied twice when a reply is
    lost."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._gangs: list[Any] = []
        self._cleared = 0

    async def spawn(
        self, name: str, resources: Resources, cls: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        import ray

        known_as = f"{name}-{self._cleared}"  # a new one each time: Ray frees a dead actor's name some time later
        remote = cast(Any, ray.remote)(concurrency_groups={ASIDE: 1})(cls).options(
            name=known_as,
            max_concurrency=ACTOR_CONCURRENCY,
            **options(resources),
        )
        handle: Any = remote.remote(*args, **kwargs)
        self._handles.append(handle)
        proxy = _Proxy(name, known_as, getattr(cls, "IDEMPOTENT", frozenset()), handle)
        try:
            await proxy.settle()
        except asyncio.CancelledError:  # it has no place yet, and nobody waits for it any longer
            self.end(proxy)
            raise
        if resources.idle_priority:
            await proxy.run(_lower_priority)
        return cast(T, proxy)

    async def gang(self, each: Resources, members: int, timeout_s: float) -> list[Resources]:
        group, places = await reserve(each, members, timeout_s)
        self._gangs.append(group)
        return places

    def end(self, actor: object) -> None:
        import ray

        handle = handle_of(actor)
        ray.kill(handle)
        self._handles.remove(handle)

    def clear(self) -> None:
        import ray

        for handle in self._handles:
            ray.kill(handle)
        for gang in self._gangs:
            release(gang)
        self._handles.clear()
        self._gangs.clear()
        self._cleared += 1


class StandIn:
    """Stands for an actor and adds something to its calls."""

    def __init__(self, actor: object) -> None:
        self.stands_for = actor


def itself(actor: object) -> object:
    """The actor behind a stand-in, or the one that has none: what other actors are given."""
    return actor.stands_for if isinstance(actor, StandIn) else actor


async def settle(actor: object) -> None:
    """To be called when the process of an actor was made anew."""
    if isinstance(proxy := itself(actor), _Proxy):
        await proxy.settle()


def end_process(actor: object) -> bool:
    """End the process of an actor that has become useless, for another to be made; False where it has none."""
    if not isinstance(proxy := itself(actor), _Proxy):
        return False
    proxy.end_process()
    return True


def handle_of(actor: object) -> Any:
    """Ray's handle of an actor that has a process of its own, else None."""
    return proxy.handle() if isinstance(proxy := itself(actor), _Proxy) else None


def _settle(_: object) -> None:
    """What the driver's process has done for itself. Ray puts the driver's directory on the worker's path, where a
    foreign `actors/` folder would win; and the worker may be on another machine."""
    install_guard.check()
    minimum_versions.check()
    os.umask(OWNER_ONLY)
    gc.freeze()  # what is imported stays
    gc.set_threshold(*GARBAGE)


def _lower_priority(_: object) -> None:
    """Linux schedules threads, and this one is not the one that computes. An idle thread gives way at once, where a
    nice one may use up its time slice."""
    if not hasattr(os, "SCHED_IDLE"):  # macOS
        os.setpriority(os.PRIO_PROCESS, 0, 19)
        return
    for task in Path("/proc/self/task").iterdir():
        os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))


class _Proxy:
    """Stands for an actor in another process. It travels to other actors by name: Ray warns of handles among the
    arguments of an actor that can be made anew."""

    def __init__(self, name: str, known_as: str, idempotent: frozenset[str], handle: Any = None) -> None:
        """`known_as` to Ray. `idempotent` methods are called again when a reply is lost; they may have been served."""
        self._name = name
        self._known_as = known_as
        self._idempotent = idempotent
        self._found = handle

    def __reduce__(self) -> tuple[type["_Proxy"], tuple[str, str, frozenset[str]]]:
        return _Proxy, (self._name, self._known_as, self._idempotent)

    def handle(self) -> Any:
        if self._found is None:
            import ray

            try:
                self._found = ray.get_actor(self._known_as)
            except ValueError:
                raise self._dead("as nobody of its name is left") from None
        return self._found

    def end_process(self) -> None:
        import ray

        ray.kill(self.handle(), no_restart=False)

    async def settle(self) -> None:
        await self.run(_settle)

    async def run(self, function: Callable[[object], None]) -> None:
        """In the actor's process."""
        await self._call(self.handle().__ray_call__, "start", function)

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)
        remote = getattr(self.handle(), method)
        if method in self._idempotent:
            remote = remote.options(max_task_retries=-1)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self._call(remote, method, *args, **kwargs)

        return call

    async def _call(self, remote: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        from ray import exceptions

        try:
            return await remote.remote(*args, **kwargs)
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, AsyncRLError):
                raise error.cause from None  # our own errors say it all; others keep the remote traceback
            raise
        except exceptions.RayActorError as error:
            died = self._dead(f"during {method}: {error}")
            died.returns = isinstance(error, exceptions.ActorUnavailableError)
            raise died from None

    def _dead(self, how: str) -> ActorError:
        error = ActorError(f"actor {self._name} died {how}")
        error.actor = self._name
        return error


@contextmanager
def cluster(address: str, *, cpus: float) -> Generator[Spawner, None, None]:
    """`inprocess`, a local Ray of our own (`local`), or an existing one (`auto` or an address)."""
    if address == "inprocess":
        yield InProcess()
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # silences a notice about GPU visibility
    with _own(cpus) if address == "local" else attached(address):
        yield OnRay()


@contextmanager
def _own(cpus: float) -> Generator[None, None, None]:
    os.environ.setdefault("RAY_worker_niceness", "0")  # on a machine of our own the actors are the work
    with auth.own_ray() as directory:
        import ray  # not earlier: it reads its environment once

        processors = max(ceil(cpus), os.cpu_count() or 1)
        ray.init(num_cpus=processors, include_dashboard=False, logging_level=logging.ERROR, _temp_dir=str(directory))
        try:
            yield
        finally:
            ray.shutdown()
