"""One exception tree. Each class also is the standard type it refines, and pickles, so it can cross actors."""

from typing import ClassVar


class AsyncRLError(Exception):
    """Base of every error this project raises on purpose."""

    exit_code: ClassVar[int] = 2
    """Of the command that it ends; docs/commands.md has the table."""


class ConfigError(AsyncRLError, ValueError):
    """A setting is wrong; the message names the field, the value and the way out."""


class MissingDependencyError(AsyncRLError, ImportError):
    """An optional package is not installed; the message holds the command that installs it."""


class SandboxError(AsyncRLError, RuntimeError):
    """Model-written code cannot be contained here; the message says why and what to do."""


class CheckpointError(AsyncRLError, ValueError):
    """A model or training checkpoint cannot be used as asked."""


class ChatError(AsyncRLError, ValueError):
    """Messages of a harness that the model's chat template cannot show; the message says why."""


class RouteError(AsyncRLError, ValueError):
    """A sample lacks the routes that are to be replayed, or they are not those of its tokens; the message names it."""


class DistillationError(AsyncRLError, ValueError):
    """A sample lacks what its teachers should have said of it; the message names it."""


class CorruptSegmentError(AsyncRLError, OSError):
    """A sealed buffer segment failed its checksum; the message names file and offset."""

    exit_code = 6


class StorageError(AsyncRLError, OSError):
    """The disk refused a write; what was acknowledged before is safe."""

    exit_code = 6


class WeightSyncError(AsyncRLError, RuntimeError):
    """An engine did not acknowledge the digest that was published."""

    exit_code = 5


class EngineError(AsyncRLError, RuntimeError):
    """An engine refused or lost a request."""

    exit_code = 4


class DrafterError(AsyncRLError, RuntimeError):
    """The drafter trains no more; engines keep the heads that they have, and the run goes on."""

    exit_code = 4


class ActorError(AsyncRLError, RuntimeError):
    """An actor died; the message names it and the call that was under way."""

    exit_code = 4

    actor: str = ""
    """Its role, such as `rollout-0`."""
    returns: bool = False
    """Whether its process is being made anew."""


class RankError(AsyncRLError, RuntimeError):
    """Ranks of a trainer do not compute the same; nothing was trained on. The message names them."""

    exit_code = 4


class StallError(AsyncRLError, TimeoutError):
    """A wait passed its deadline; the message says what it waited for."""

    exit_code = 3


class EndOfDataError(AsyncRLError, LookupError):
    """The prompts are used up before the run has all its steps."""

    exit_code = 8


class DivergenceError(AsyncRLError, ArithmeticError):
    """Learning has gone wrong past its bounds; the message holds the diagnosis."""

    exit_code = 7


class Fp8Error(DivergenceError):
    """Completions in FP8 are further off than the run allows, which is to start again without FP8."""


class UserCodeError(AsyncRLError, RuntimeError):
    """A function of the user's fails whenever it is called; the message shows the first call and its error."""

    exit_code = 12


class StoppedError(AsyncRLError, InterruptedError):
    """The run was asked to end, by a signal, and has; the message says how it goes on."""

    exit_code = 10


class RayError(AsyncRLError, ConnectionError):
    """Ray could not be started, or one of its own processes died."""

    exit_code = 11


class ClusterError(AsyncRLError, ConnectionError):
    """A cluster could not be brought up, reached or taken down; the message says at which stage."""

    exit_code = 9


def first_cause(error: BaseException) -> BaseException:
    """Task groups wrap errors; a message, and who decides by the kind of error, need the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
