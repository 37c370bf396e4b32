"""The words of the book: what it is told once, what it keeps of a group, and what it answers."""

from typing import NamedTuple

import msgspec

from asyncrl.buffer.records import Begun, Stored


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """The constants of the arithmetic."""

    group_size: int
    groups_per_step: int
    max_staleness: int
    group_timeout_s: float
    max_bytes: int
    sample_bytes: int
    """First guess of the size of a sample; the largest seen replaces it when it is larger."""
    total_steps: int | None = None
    """The run ends after this many, so nothing is admitted that they cannot take; None has no end."""
    max_ready: int = 0
    """Nothing is admitted while so many groups are complete or just begun: a step's worth or more; 0 for no limit."""
    drop_uninformative: bool = False
    """End a group whose samples all earned the same reward: its advantages would be zero."""

    @property
    def begun(self) -> Begun:
        return Begun(self.group_size, self.groups_per_step, self.max_staleness)


class Lease(msgspec.Struct):
    """A group between admission and its end."""

    version: int
    expiry: int
    """The last step that may train on it."""
    deadline: float
    sample_bytes: int
    samples: dict[int, Stored] = msgspec.field(default_factory=dict[int, Stored])

    @property
    def uninformative(self) -> bool:
        """No sample was better than another; asked of complete groups."""
        return len({stored.reward for stored in self.samples.values()}) == 1


class Refusal(NamedTuple):
    """Why no group is admitted now."""

    reason: str
    lacking: int = 0
    """Bytes that a group needs, where memory is the reason."""


class Choice(NamedTuple):
    """What a take would do: drop these for age, deliver those."""

    stale: tuple[int, ...]
    groups: tuple[int, ...]
    reserved: bool
    """Further complete groups must wait, because the places left belong to groups that expire before them."""
