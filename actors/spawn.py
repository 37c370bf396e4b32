"""Runs plain classes as actors. The only file, with pipelines/placement.py, that knows Ray.

A class is written once, with async methods; `InProcess` builds it here, `OnRay` builds it in a process of its own and
returns a proxy with the same awaitable methods, so a pipeline cannot tell them apart and pyright checks both alike.
"""

import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import msgspec

from asyncrl import one_tree
from asyncrl.errors import ActorError, AsyncRLError, ConfigError

P = ParamSpec("P")
T = TypeVar("T")
ACTOR_CONCURRENCY = 100_000
"""Calls one actor may have under way: each is a coroutine, and most of them only wait."""


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """What one actor takes from the cluster."""

    cpus: float = 1.0
    gpus: float = 0.0
    idle_priority: bool = False
    """In a process of its own it gets only the time that nobody else wants."""


class Spawner(Protocol):
    """Where actors come from."""

    async def spawn(
        self, name: str, resources: Resources, cls: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...


class InProcess:
    """Every actor lives in the caller's event loop: for tests, notebooks and debuggers."""

    async def spawn(
        self, name: str, resources: Resources, cls: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        return cls(*args, **kwargs)


class OnRay:
    """Every actor is a Ray actor. Nothing is retried by Ray: a retried call is applied twice when a reply is lost."""

    async def spawn(
        self, name: str, resources: Resources, cls: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        import ray

        remote = ray.remote(cls).options(
            name=name,
            num_cpus=resources.cpus,
            num_gpus=resources.gpus,
            max_concurrency=ACTOR_CONCURRENCY,
            max_restarts=0,
            max_task_retries=0,
        )
        handle: Any = remote.remote(*args, **kwargs)
        # Ray puts the driver's directory on the worker's path, where a foreign `actors/` folder would win.
        await handle.__ray_call__.remote(_check_one_tree)
        if resources.idle_priority:
            await handle.__ray_call__.remote(_lower_priority)
        return cast(T, _Proxy(name, handle))


def _check_one_tree(_: object) -> None:
    one_tree.check()


def _lower_priority(_: object) -> None:
    """Linux schedules threads, and this one is not the one that computes. An idle thread gives way at once, where a
    nice one may use up its time slice."""
    if not hasattr(os, "SCHED_IDLE"):  # macOS
        os.setpriority(os.PRIO_PROCESS, 0, 19)
        return
    for task in Path("/proc/self/task").iterdir():
        os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))


class _Proxy:
    """Stands for an actor in another process; travels to other actors as a plain handle."""

    def __init__(self, name: str, handle: Any) -> None:
        self._name = name
        self._handle = handle

    def __reduce__(self) -> tuple[type["_Proxy"], tuple[str, Any]]:
        return _Proxy, (self._name, self._handle)

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)
        from ray import exceptions

        remote = getattr(self._handle, method)

        async def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return await remote.remote(*args, **kwargs)
            except exceptions.RayTaskError as error:
                if isinstance(error.cause, AsyncRLError):
                    raise error.cause from None  # our own errors say it all; others keep the remote traceback
                raise
            except exceptions.RayActorError as error:
                raise ActorError(f"actor {self._name} died during {method}: {error}") from None

        return call


@contextmanager
def cluster(address: str, *, cpus: float) -> Generator[Spawner, None, None]:
    """`inprocess`, a local Ray of our own (`local`), or an existing one (`auto` or an address)."""
    if address == "inprocess":
        yield InProcess()
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # silences a notice about GPU visibility
    if address == "local":
        # The token travels in the environment of our own processes: never in a file, an argument or a log.
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        os.environ.setdefault("RAY_worker_niceness", "0")  # on a machine of our own the actors are the work
    import ray  # not earlier: it reads its environment once

    if address == "local":
        ray.init(num_cpus=max(ceil(cpus), os.cpu_count() or 1), include_dashboard=False, logging_level=logging.ERROR)
    else:
        try:
            ray.init(address=address, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise ConfigError(f"cluster={address}: no Ray answers there ({error}); use cluster=local") from None
    try:
        yield OnRay()
    finally:
        ray.shutdown()
