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
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import psutil

from actors.runtime import auth
from actors.runtime.attach import attached
from actors.runtime.resources import Resources, options, release, reserve
from asyncrl.errors import ActorError, AsyncRLError, RayError
from asyncrl.system import install_guard, minimum_versions, quiet
from asyncrl.system.run_directory import OWNER_ONLY

P = ParamSpec("P")
T = TypeVar("T")
ACTOR_CONCURRENCY = 100_000
"""Calls that one actor may have in progress: each is a coroutine, and most of them only wait."""
ASIDE = "aside"
"""A thread of each actor's process that answers while its event loop computes or hangs."""
GC_THRESHOLDS = (50_000, 20, 50)
"""An actor holds thousands of unfinished completions, each of many objects and none of them garbage. With Python's own
thresholds (700, 10, 10), scanning them again and again takes a third of a rollout actor's time."""


class Spawner(Protocol):
    """Creates actors, and ends them."""

    async def spawn(
        self, name: str, resources: Resources, cls: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...

    async def gang(self, each: Resources, members: int, timeout_s: float) -> list[Resources]:
        """Reserve resources for actors that are of use only together, held until `clear`; one `Resources` to spawn each
        with."""
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
    """Every actor is a Ray actor. Ray retries only repeatable calls: a retried call is applied twice when a reply is
    lost."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._gangs: list[Any] = []
        self._cleared = 0

    async def spawn(
        self, name: str, resources: Resources, cls: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        import ray

        ray_name = f"{name}-{self._cleared}"  # a new one each time: Ray frees a dead actor's name some time later
        remote = cast(Any, ray.remote)(concurrency_groups={ASIDE: 1})(cls).options(
            name=ray_name,
            max_concurrency=ACTOR_CONCURRENCY,
            **options(resources),
        )
        handle: Any = remote.remote(*args, **kwargs)
        self._handles.append(handle)
        proxy = _Proxy(name, ray_name, getattr(cls, "IDEMPOTENT", frozenset()), handle)
        try:
            await proxy.prepare()
        except asyncio.CancelledError:  # it is not placed yet, and nobody waits for it any longer
            self.end(proxy)
            raise
        if resources.idle_priority:
            await proxy.run_in_process(_lower_priority)
        return cast(T, proxy)

    async def gang(self, each: Resources, members: int, timeout_s: float) -> list[Resources]:
        group, resources = await reserve(each, members, timeout_s)
        self._gangs.append(group)
        return resources

    def end(self, actor: object) -> None:
        import ray

        handle = handle_of(actor)
        ray.kill(handle)
        if handle in self._handles:  # else it was ended before
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


class ActorWrapper:
    """Wraps an actor and adds something to its calls."""

    def __init__(self, actor: object) -> None:
        self.wrapped = actor


def unwrap(actor: object) -> object:
    """The actor inside a wrapper, or the actor if it has none: what is passed to other actors."""
    return actor.wrapped if isinstance(actor, ActorWrapper) else actor


async def prepare_process(actor: object) -> None:
    """To be called when the process of an actor was restarted."""
    if isinstance(proxy := unwrap(actor), _Proxy):
        await proxy.prepare()


def end_process(actor: object) -> bool:
    """End the process of an actor so that Ray restarts it; False if it has no process of its own."""
    if not isinstance(proxy := unwrap(actor), _Proxy):
        return False
    proxy.end_process()
    return True


def handle_of(actor: object) -> Any:
    """Ray's handle of an actor that has a process of its own, else None."""
    return proxy.handle() if isinstance(proxy := unwrap(actor), _Proxy) else None


def _prepare_process(_: object) -> None:
    """Set up an actor's process as the driver's. Ray puts the driver's directory on the worker's path, where a
    foreign `actors/` folder would win; and the worker may be on another machine."""
    quiet.quieten()
    install_guard.check()
    minimum_versions.check()
    os.umask(OWNER_ONLY)
    gc.freeze()  # what is imported stays
    gc.set_threshold(*GC_THRESHOLDS)


def _lower_priority(_: object) -> None:
    """Of all threads of this process: Linux schedules threads, and this one is not the one that computes. A thread of
    idle priority yields at once, where a nice one may use up its time slice."""
    if not hasattr(os, "SCHED_IDLE"):  # macOS
        os.setpriority(os.PRIO_PROCESS, 0, 19)
        return
    for thread in psutil.Process().threads():
        os.sched_setscheduler(thread.id, os.SCHED_IDLE, os.sched_param(0))


class _Proxy:
    """Stands for an actor in another process. It is sent to other actors by name: Ray warns of handles among the
    arguments of an actor that can be restarted."""

    def __init__(self, name: str, ray_name: str, idempotent: frozenset[str], handle: Any = None) -> None:
        """`ray_name` to Ray. `idempotent` methods are called again when a reply is lost; they may have been served."""
        self._name = name
        self._ray_name = ray_name
        self._idempotent = idempotent
        self._handle = handle

    def __reduce__(self) -> tuple[type["_Proxy"], tuple[str, str, frozenset[str]]]:
        return _Proxy, (self._name, self._ray_name, self._idempotent)

    def handle(self) -> Any:
        if self._handle is None:
            import ray

            try:
                self._handle = ray.get_actor(self._ray_name)
            except ValueError:
                raise self._dead("as nobody of its name is left") from None
        return self._handle

    def end_process(self) -> None:
        import ray

        ray.kill(self.handle(), no_restart=False)

    async def prepare(self) -> None:
        await self.run_in_process(_prepare_process)

    async def run_in_process(self, function: Callable[[object], None]) -> None:
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
            cause: BaseException | None = error.cause
            while isinstance(cause, BaseExceptionGroup):
                cause = cause.exceptions[0]
            if isinstance(cause, AsyncRLError):
                raise cause from None  # our own errors say it all; others keep the remote traceback
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
    with _local_ray(cpus) if address == "local" else attached(address):
        yield OnRay()


@contextmanager
def _local_ray(cpus: float) -> Generator[None, None, None]:
    os.environ.setdefault("RAY_worker_niceness", "0")  # on a machine of our own the actors are the work
    with auth.own_ray() as directory:
        import ray  # not earlier: it reads its environment once

        processors = max(ceil(cpus), os.cpu_count() or 1)
        try:
            _start(ray, num_cpus=processors, include_dashboard=False, _temp_dir=str(directory))
            yield
        finally:
            ray.shutdown()


def _start(ray: Any, **settings: Any) -> None:
    try:
        ray.init(logging_level=logging.ERROR, **settings)
    except Exception as error:  # its own kinds and bare ones, with a page of text each
        reason = str(error).strip().partition("\n")[0]
        raise RayError(
            f"Ray could not be started ({reason}); its logs are below {settings['_temp_dir']}. On a machine that is "
            "too busy it gives up after half a minute: try again"
        ) from None
