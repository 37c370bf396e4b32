"""Functions of the user's, by name: `package.module:function` or `path/to/file.py:function`.

What has no such name, as a lambda or a function written in a notebook, can be kept here for runs in this very process:
`here:` and the name under which it was kept.
"""

import sys
import sysconfig
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.errors import AsyncRLError, ConfigError, UserCodeError

HERE = "here:"
_kept: dict[str, Callable[..., Any]] = {}
_loading: list[Path] = []


def find_function(location: str) -> Callable[..., Any]:
    """Import it; whatever the user's module raises comes through."""
    if is_here(location):
        return _find_here(location)
    place, _, name = location.rpartition(":")
    module = _load_file(Path(place)) if place.endswith(".py") else import_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise ImportError(f"{place} has no function {name!r}")
    return function


def load_function(location: str, field: str) -> Callable[..., Any]:
    """The function that the setting `field` names, or a ConfigError that names the setting."""
    return _find_here(location) if is_here(location) else _load_once(location, field)


@cache
def _load_once(location: str, field: str) -> Callable[..., Any]:
    try:
        return find_function(location)
    except Exception as error:  # importing runs the user's code
        raise ConfigError(
            f"{field}={location} cannot be used ({type(error).__name__}: {error}); write package.module:function or "
            "path/to/file.py:function"
        ) from error


def name_of(function: Callable[..., Any]) -> str | None:
    """The name by which any process of this machine finds a function; None for one that only this process has."""
    name, module = getattr(function, "__qualname__", "?"), sys.modules.get(getattr(function, "__module__", ""))
    if module is None or getattr(module, name, None) is not function:
        return None
    if module.__name__ != "__main__" and "." in module.__name__:
        return f"{module.__name__}:{name}"
    file = Path(getattr(module, "__file__", None) or "")
    return f"{file.resolve()}:{name}" if file.suffix == ".py" and file.is_file() else None


def keep_here(function: Callable[..., Any], name: str) -> str:
    """Its location, good in this process alone; the same name again stands for the newer function."""
    _kept[f"{HERE}{name}"] = function
    return f"{HERE}{name}"


LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
OURS = tuple(str(Path(__file__).parents[2] / name) + "/" for name in ("asyncrl", "actors", "pipelines"))


def raised_at(error: BaseException) -> tuple[str, str]:
    """`file:line` where the user's code raised an error, and that line; both empty where none of it was running.

    What the user's code calls may have raised it: then the line is that of the call.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen ")]
    own = [frame for frame in frames if not frame.filename.startswith((*OURS, *LIBRARIES))]
    elsewhere = [frame for frame in frames if not frame.filename.startswith((*OURS, *LIBRARIES[:2]))]
    found = (own or elsewhere)[-1:]
    return (f"{found[0].filename}:{found[0].lineno}", (found[0].line or "").strip()) if found else ("", "")


@contextmanager
def calling(field: str, location: str, expected: str) -> Generator[None, None, None]:
    """Around a call of the function that the setting `field` names: what it raises becomes a UserCodeError with the
    line of the user's file. `expected` says what the function is called with, and what it has to return."""
    try:
        yield
    except AsyncRLError:
        raise
    except Exception as error:  # the user's code may raise anything
        place, source = raised_at(error)
        words = " ".join(f"{type(error).__name__}: {error}".split())
        rows = ([("in the line", source)] if source else []) + [("expected", expected)]
        below = "".join(f"\n  {label:14}{text}" for label, text in rows)
        raise UserCodeError(f"{field}={location}: {words}{f' ({place})' if place else ''}{below}") from error


def is_here(location: str) -> bool:
    return location.startswith(HERE)


def loaded_file() -> Path | None:
    """The user's file that is being imported at this moment, for what must not happen then."""
    return _loading[-1] if _loading else None


def _find_here(location: str) -> Callable[..., Any]:
    if location not in _kept:
        raise ConfigError(
            f"{location} was written in the program or notebook that started the run, and is not known here: go on "
            "from there with Pipeline(...).resume(), or put it into a file and name it path/to/file.py:function"
        )
    return _kept[location]


def _load_file(path: Path) -> ModuleType:
    name = f"user_file_{path.stem}"  # a file called json.py must not hide the real json
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))  # as if it were run: its neighbours can be imported
    with _loads(path):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _loads(path: Path) -> Generator[None, None, None]:
    _loading.append(path)
    try:
        yield
    finally:
        _loading.pop()
