"""The child that calls a function of the user's: `python -m asyncrl.user_code.worker reward module:function`.

Requests come in on stdin and results go out on stdout, one frame each: four bytes of length, then msgpack. The first
result says whether the function could be imported. The user's code gets neither pipe: its prints go to stderr and its
stdin is empty. When the parent goes away, in whatever manner, the worker ends itself and the group that it leads.
"""

import inspect
import os
import select
import signal
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, BinaryIO, NamedTuple

import msgspec

from asyncrl.drop_reasons import DropReason, UserFunction
from asyncrl.system.user_functions import find_function
from asyncrl.user_code.protocol import RewardFailure, RewardInput, RewardResult, attempt
from asyncrl.user_code.score import RULE, Score, read_score

HEADER = struct.Struct("<I")

Function = Callable[..., object]


class Kind(NamedTuple):
    """What travels to a function and back."""

    input: Any
    output: Any
    call: Callable[[Function, Any], Any]
    takes: int = 0
    """Arguments of a call; 0: it is not checked beforehand that the function takes them."""


def kind_of(name: str) -> Kind:
    """Imports only what this kind needs: a worker is started for each function."""
    match name:
        case "environment":
            from asyncrl.user_code.environments import Conversation, respond

            return Kind(Conversation, str, respond, takes=3)
        case "stage":
            from asyncrl.user_code.stages import Sample, Verdict, pass_through

            return Kind(list[Sample], list[Verdict], pass_through, takes=1)
        case "agent":
            from asyncrl.user_code.agents import Ended, Task, play

            return Kind(Task | str, Ended | str, play)  # a text names an episode
        case _:
            return Kind(RewardInput, float | Score, judge, takes=3)


def main(name: UserFunction, location: str) -> None:
    requests, answers = connect()
    kind = kind_of(name)
    function = attempt(name, _find, location, kind.takes)  # importing runs the user's code
    answer(answers, function if isinstance(function, RewardFailure) else None)
    if isinstance(function, RewardFailure):
        return
    for given in frames(requests, kind.input):
        answer(answers, kind.call(function, given))


def _find(location: str, takes: int) -> Function:
    """TypeError if it does not take so many arguments; some functions written in C do not say what they take."""
    function = find_function(location)
    with suppress(ValueError):
        signature = inspect.signature(function)
        if takes and not _binds(signature, takes) and not _binds(signature, takes, turns=()):
            name = location.rpartition(":")[2]
            raise TypeError(f"it is declared as {name}{signature}, and called with {takes} arguments")
    return function


def _binds(signature: inspect.Signature, arguments: int, **named: object) -> bool:
    try:
        signature.bind(*range(arguments), **named)
    except TypeError:
        return False
    return True


def judge(function: Function, sample: RewardInput) -> RewardResult:
    value = attempt("reward", _judge, function, sample)
    if isinstance(value, RewardFailure):
        return value
    if (score := read_score(value)) is None:
        shown = " ".join(f"{value!r:.200}".split())
        return RewardFailure(DropReason.REWARD_INVALID, f"returned {shown}; {RULE}{_hint(value)}")
    return score if score.parts else score.total


def _hint(value: object) -> str:
    """What was probably meant by a value that is no reward."""
    match value:
        case None:
            return "; a function that ends without `return` returns None"
        case str():
            return "; this is a text: return float(...) of it"
        case float():
            return "; this is what a division by zero or the mean of nothing gives"
        case _ if hasattr(value, "item") and hasattr(value, "shape"):
            return f"; this is a {type(value).__name__}: return its number, as value.item() gives it"
        case list() | tuple():
            return "; this is a list: the function gets one completion at a time, not a batch, and returns one reward"
        case _:
            return ""


def _judge(function: Function, sample: RewardInput) -> object:
    """A function with a parameter `turns` is shown the whole conversation."""
    if sample.turns and "turns" in inspect.signature(function).parameters:
        return function(sample.prompt, sample.completion, sample.answer, turns=list(sample.turns))
    return function(sample.prompt, sample.completion, sample.answer)


def connect(before_death: Callable[[], None] = lambda: None) -> tuple[BinaryIO, BinaryIO]:
    """Requests and answers. From now on the worker dies with its parent, after a call of `before_death`."""
    requests, answers = _private_pipes()
    threading.Thread(target=_die_with_parent, args=(requests.fileno(), before_death), daemon=True).start()
    return requests, answers


def frames(requests: BinaryIO, kind: Any) -> Iterator[Any]:
    """What the parent sends, until it closes the pipe."""
    decoder = msgspec.msgpack.Decoder(kind)
    while header := requests.read(HEADER.size):
        yield decoder.decode(requests.read(HEADER.unpack(header)[0]))


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    # Requests stay open to the end: if the watcher first looks when `main` is done, closed ones would be a hang-up.
    requests = os.fdopen(os.dup(0), "rb", closefd=False)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, answers


def answer(answers: BinaryIO, result: object) -> None:
    payload = msgspec.msgpack.encode(result)
    try:
        answers.write(HEADER.pack(len(payload)) + payload)
    except BrokenPipeError:  # nobody is left to hear it, nor anything more
        os._exit(0)


def _die_with_parent(requests: int, before_death: Callable[[], None]) -> None:
    """Wait until the other end of stdin is closed, also while the function runs or hangs."""
    poll = select.poll()
    poll.register(requests, 0)  # no event but the hang-up
    poll.poll()
    before_death()
    with suppress(ProcessLookupError):  # it leads no group: the one that it is in is somebody else's
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(msgspec.convert(sys.argv[1], UserFunction), sys.argv[2])
