"""Imports of what is not installed with asyncrl itself."""

from importlib import import_module
from types import ModuleType

from asyncrl.errors import MissingDependencyError


def require(module: str, *, extra: str) -> ModuleType:
    """Import `module`, or say which command installs it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # installed, but broken inside: show the real failure
        raise MissingDependencyError(
            f"{module!r} is needed here; install it with `pip install 'asyncrl[{extra}]'`"
        ) from None
