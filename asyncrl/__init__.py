"""Asynchronous, actor-based RL post-training for language models.

`asyncrl` holds the parts, `actors` runs them on Ray, `pipelines` puts them together. The names below are loaded when
they are first used, so that `import asyncrl` stays free of torch and Ray.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from asyncrl import renamed_modules

if TYPE_CHECKING:
    from asyncrl.algorithms.base import Samples as Samples
    from asyncrl.algorithms.base import Tokens as Tokens
    from asyncrl.config import Run as Run
    from asyncrl.types import Prompt as Prompt
    from asyncrl.user_code.score import Score as Score
    from asyncrl.user_code.stages import Drop as Drop
    from asyncrl.user_code.stages import Sample as Sample
    from pipelines.pipeline import Pipeline as Pipeline

__version__ = "0.1.0"

_PUBLIC = {
    "Drop": "asyncrl.user_code.stages",
    "Pipeline": "pipelines.pipeline",
    "Prompt": "asyncrl.types",
    "Run": "asyncrl.config",
    "Sample": "asyncrl.user_code.stages",
    "Samples": "asyncrl.algorithms.base",
    "Score": "asyncrl.user_code.score",
    "Tokens": "asyncrl.algorithms.base",
}

renamed_modules.install()


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'asyncrl' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
