"""What the user's functions failed with: the first call that failed in each way, and whether any call succeeds.

A function that fails on some samples costs these samples. One that fails on all of them costs the run: it would sample
without end and train on nothing.
"""

from collections import Counter
from typing import Any, cast

import msgspec

from asyncrl.config.judge import Judge
from asyncrl.config.user_code import Called
from asyncrl.user_code.protocol import RewardFailure

ENOUGH = 32
"""Samples that have failed, and no other: the function fails always."""
TIMEOUT_WEIGHT = 4
"""A call that was ended at its deadline counts as so many, because each takes as long as it may."""
SHOWN = ("prompt", "completion", "first", "second", "turns", "answer")
MOST = 300
"""Characters of an argument that are shown."""


Described = Called | Judge
"""Whoever may be called and fail: a function of the user's, or a judge."""


class FunctionFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The first call of one function that failed in one way."""

    function: str
    field: str
    """The setting that names it."""
    reason: str
    message: str
    source: str = ""
    """The line of the user's file that raised."""
    arguments: dict[str, str] = {}
    """Of the call, as Python writes them."""


class Failures(msgspec.Struct, frozen=True, kw_only=True):
    """What a reward actor says of its functions."""

    first: tuple[FunctionFailure, ...] = ()
    always: str = ""
    """What ends the run: a function that fails on every sample, in words."""


class CallRecord:
    """The calls of one function so far."""

    def __init__(self, settings: Described, each: str = "sample") -> None:
        """`each` is what one call was for, in words."""
        self._settings, self._each = settings, each
        self._succeeded = 0
        self._failed = Counter[str]()
        self._first: dict[str, FunctionFailure] = {}

    def add(self, given: object, result: object) -> None:
        """`given` is what one call got, `result` what came of it."""
        samples = len(cast(list[Any], given)) if isinstance(given, list) else 1
        if not isinstance(result, RewardFailure):
            self._succeeded += samples
            return
        self._failed[result.reason] += samples
        if result.reason not in self._first:
            self._first[result.reason] = FunctionFailure(
                function=self._settings.value,
                field=self._settings.field,
                reason=result.reason,
                message=result.message,
                source=result.source,
                arguments=_arguments(given),
            )

    @property
    def first(self) -> tuple[FunctionFailure, ...]:
        return tuple(self._first.values())

    @property
    def always(self) -> str:
        """Why no sample will ever pass this function; empty while one has, or too few have failed."""
        weighed = sum(count * (TIMEOUT_WEIGHT if is_timeout(each) else 1) for each, count in self._failed.items())
        if self._succeeded or weighed < ENOUGH:
            return ""
        counted = ", ".join(f"{count} {reason}" for reason, count in self._failed.most_common())
        first = self._first[self._failed.most_common(1)[0][0]]
        return explain(self._settings, first, f"it has failed on every {self._each} so far ({counted})")


def explain(settings: Described, failure: FunctionFailure, how_often: str) -> str:
    """The failure in one sentence, and below it the call and what is expected."""
    rows = [("in the line", failure.source)] if failure.source else []
    rows += [("called with", f"{name} = {value}") for name, value in failure.arguments.items()]
    rows += [("expected", settings.expected), ("to return", settings.RETURNS)]
    shown = [f"  {'' if i and rows[i - 1][0] == label else label:14}{text}" for i, (label, text) in enumerate(rows)]
    return "\n".join([f"{settings.field}={settings.value}: {failure.message}; {how_often}", *shown])


def _arguments(given: object) -> dict[str, str]:
    """Of a stage's call those of its first sample."""
    one: Any = cast(list[Any], given)[0] if isinstance(given, list) and given else given
    found = {name: getattr(one, name) for name in SHOWN if getattr(one, name, None) is not None}
    return {name: shortened(value) for name, value in found.items() if value != ()}


def shortened(value: object) -> str:
    text = repr(list(cast(tuple[Any, ...], value)) if isinstance(value, tuple) else value)
    return text if len(text) <= MOST else f"{text[:MOST]}... ({len(text):,} characters)"


def is_timeout(reason: str) -> bool:
    return reason.endswith("_timeout")
