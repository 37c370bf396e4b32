"""Stages: functions of the user's between the reward and the buffer."""

from asyncrl.rewards.settings import Called


class Stage(Called, frozen=True):
    """A filter or a judge."""

    KIND = "stage"

    function: str
    """`package.module:function` or `path/to/file.py:function`, called as f(samples: list[Sample])."""


Stages = tuple[Stage | str, ...]
"""A plain text is the function of a stage with defaults."""


def stages(given: Stages) -> list[Stage]:
    return [Stage(function=each) if isinstance(each, str) else each for each in given]
