"""One exception tree. Each class also is the standard type it refines, and pickles, so it can cross actors."""


class AsyncRLError(Exception):
    """Base of every error this project raises on purpose."""


class ConfigError(AsyncRLError, ValueError):
    """A setting is wrong; the message names the field, the value and the way out."""


class MissingDependencyError(AsyncRLError, ImportError):
    """An optional package is not installed; the message holds the command that installs it."""


class CheckpointError(AsyncRLError, ValueError):
    """A model or training checkpoint cannot be used as asked."""


class CorruptSegmentError(AsyncRLError, OSError):
    """A sealed buffer segment failed its checksum; the message names file and offset."""


class StorageError(AsyncRLError, OSError):
    """The disk refused a write; what was acknowledged before is safe."""


class WeightSyncError(AsyncRLError, RuntimeError):
    """An engine did not acknowledge the digest that was published."""


class EngineError(AsyncRLError, RuntimeError):
    """An engine refused or lost a request."""


class ActorError(AsyncRLError, RuntimeError):
    """An actor died; the message names it and the call that was under way."""


class StallError(AsyncRLError, TimeoutError):
    """A wait passed its deadline; the message says what it waited for."""


class DivergenceError(AsyncRLError, ArithmeticError):
    """Learning has gone wrong past its bounds; the message holds the diagnosis."""
