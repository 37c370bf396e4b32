"""Health probes: functions that run inside actors, called from any thread of the driver, each with a deadline.

An actor's event loop computes as well, and may hang. So each process has a second thread, `aside`, that answers probes
meanwhile; an actor that does not answer there either is stopped, or stuck outside Python.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from actors.runtime.spawn import ASIDE, handle_of
from asyncrl.errors import ActorError

T = TypeVar("T")


def probe(actors: Mapping[str, object], function: Callable[[Any], T], timeout_s: float) -> dict[str, T | ActorError]:
    """What `function` returns inside each actor, beside its event loop; without those that do not answer in time."""
    here = {name: function(actor) for name, actor in actors.items() if not has_own_process(actor)}
    there = {
        name: handle_of(actor).__ray_call__.options(concurrency_group=ASIDE).remote(function)
        for name, actor in actors.items()
        if has_own_process(actor)
    }
    return {**here, **_answers(there, timeout_s)}


def responsive(actors: Mapping[str, object], timeout_s: float) -> set[str]:
    """The actors with processes of their own whose event loops answer in time."""
    apart = {name: handle_of(actor) for name, actor in actors.items() if has_own_process(actor)}
    return set(_answers({name: handle.__ray_call__.remote(_nothing) for name, handle in apart.items()}, timeout_s))


def has_own_process(actor: object) -> bool:
    """Whether it has a process of its own."""
    return handle_of(actor) is not None


def kill(actor: object) -> None:
    """End an actor for good, even if it hangs or is stopped; does nothing to one without a process of its own."""
    if has_own_process(actor):
        import ray

        ray.kill(handle_of(actor))


def _nothing(_: object) -> None: ...


def _answers(pending: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    if not pending:
        return {}
    import ray
    from ray import exceptions

    names = {answer: name for name, answer in pending.items()}
    done, _ = ray.wait(list(names), num_returns=len(names), timeout=timeout_s)
    found: dict[str, Any] = {}
    for answer in done:
        try:
            found[names[answer]] = ray.get(answer)
        except exceptions.RayActorError as error:
            found[names[answer]] = ActorError(str(error))
        except exceptions.RayTaskError:  # the probe met a state in the middle of a change
            continue
    return found
