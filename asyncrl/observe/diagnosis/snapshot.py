"""Who waits for what, and since when: a snapshot of a run, as plain data. Ages are seconds: no two clocks are compared.

`Situation` is what an actor reports; `ActorView` what the driver knows of an actor, whether it answers or not;
`Snapshot` all of it together, which `explain` turns into a sentence.
"""

from typing import Literal

import msgspec

from asyncrl.types import BufferStatus

Stage = Literal["generate", "environment", "agent", "verdict", "reward", "teacher", "compare", "append"]
Health = Literal["answers", "busy", "silent", "stopped", "dead"]
"""`busy`: the process answers, but its event loop takes no calls. `silent`: the process does not answer either."""


class Doing(msgspec.Struct, frozen=True):
    """Something an actor began and has not finished."""

    what: str
    seconds: float
    on: str = ""
    """The actor that it waits for; empty while it works itself."""


class SampleAt(msgspec.Struct, frozen=True):
    """Where one sample is inside its rollout actor."""

    group: int
    sample: int
    stage: Stage
    seconds: float


class Judging(msgspec.Struct, frozen=True):
    """A reward process that has not returned yet."""

    pid: int
    seconds: float
    limit_s: float
    stopped: bool = False


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor reports to a probe. Cheap, and read by a thread of its own, also while the actor computes."""

    pid: int
    place: str
    """The machine and its PID namespace: processes with the same value can see each other."""
    last_event: str
    last_event_s: float
    doing: tuple[Doing, ...] = ()
    """Oldest first."""
    samples: tuple[SampleAt, ...] = ()
    """Of a rollout actor, those of its oldest groups; of the reward actor, those that wait to be compared."""
    num_samples: int = 0
    """All it holds, also those left out of `samples`."""
    evaluated: int = 0
    running: int = 0
    waiting: int = 0
    steps: int = 0
    """Of its engine: running and queued requests, and steps since the start."""
    buffer: BufferStatus | None = None
    completed: int = 0
    """Groups that were complete at some time and have not been dropped."""
    dropped: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """By reason: of the buffer all so far, of the reward actor those that the buffer does not count."""
    judging: tuple[Judging, ...] = ()
    queued: int = 0
    """Shares of samples that wait for a reward process, or for a teacher."""
    failures: dict[str, str] = {}
    """Of the reward actor: what the user's functions and the judge failed with first, by reason."""
    judge: str = ""
    """Of the reward actor: where its judge stands, in words, while completions wait for it."""


class ActorView(msgspec.Struct, frozen=True, kw_only=True):
    """One actor as the driver sees it."""

    name: str
    health: Health = "answers"
    silent_s: float = 0.0
    """Since it last answered, 0 if it answers."""
    process: str = ""
    """What its process does, where the driver can see it: `computes`, `sleeps`."""
    still_s: float = 0.0
    """Time since its engine's last step was seen."""
    said: Situation | None = None
    """When it last answered."""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A call of the driver that has not returned."""

    actor: str
    method: str
    seconds: float
    slots: tuple[tuple[int, int], ...] = ()
    """The (group, sample) pairs that it was sent with."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The run when it has made no progress for `idle_s`."""

    idle_s: float
    last_progress: str
    calls: tuple[Call, ...]
    """Oldest first."""
    actors: dict[str, ActorView]
    ended: dict[int, str] = msgspec.field(default_factory=dict[int, str])
    """Groups whose calls returned, and from which engine."""
    dropped: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """Samples dropped since the last progress, by reason."""
    driver_blocked: bool = False
    driver_at: str = ""
    """Where the driver's main thread is."""
    group_timeout_s: float = 0.0
    reward_function: str = ""
    judge: str = ""
    """Its address."""
    harness: str = ""
    """The function or program of an agent."""


class Explanation(msgspec.Struct, frozen=True):
    """Why the run makes no progress."""

    sentence: str
    chain: tuple[str, ...]
    """Who waits for whom, the last one being the cause."""
    suspects: tuple[str, ...]
    """Actors whose stacks are worth a look, the likeliest first."""
