"""Functions that users name in a config: `package.module:function` or `path/to/file.py:function`."""

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.errors import ConfigError


def find_function(location: str) -> Callable[..., Any]:
    """Import it; whatever the user's module raises comes through."""
    place, _, name = location.rpartition(":")
    module = _load_file(Path(place)) if place.endswith(".py") else import_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise ImportError(f"{place} has no function {name!r}")
    return function


@cache
def load_function(location: str, field: str) -> Callable[..., Any]:
    """The function that the setting `field` names, or a refusal that says so."""
    try:
        return find_function(location)
    except Exception as error:  # importing runs the user's code
        raise ConfigError(
            f"{field}={location} cannot be used ({type(error).__name__}: {error}); write package.module:function or "
            "path/to/file.py:function"
        ) from error


def _load_file(path: Path) -> ModuleType:
    name = f"user_file_{path.stem}"  # a file called json.py must not hide the real json
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))  # as if it were run: its neighbours can be imported
    spec.loader.exec_module(module)
    return module
