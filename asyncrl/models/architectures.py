"""Which architectures transformers has a causal language model for, read from its source.

Importing its table would import torch, which a plan does without. If the table cannot be found, nothing is known and
loading decides.
"""

import re
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from asyncrl.errors import CheckpointError, MissingDependencyError

_TABLE = re.compile(r"^MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = \w+\(\n(.*?)^\)", re.MULTILINE | re.DOTALL)
_ENTRY = re.compile(r'\(\s*"([^"]+)",\s*"([^"]+)"\s*\)')


def architecture(model_type: str) -> str:
    """The class of transformers for a `model_type`; CheckpointError if there is none."""
    if find_spec("transformers") is None:
        raise MissingDependencyError(
            f"model_type={model_type!r} is trained through transformers, which is not installed: "
            "pip install 'asyncrl[transformers]'"
        )
    known = causal_language_models()
    if known and model_type not in known:
        raise CheckpointError(
            f"model_type={model_type!r} is no causal language model of transformers {version('transformers')}: update "
            "transformers, or use a model of another family; code that comes with a checkpoint is never run"
        )
    return known.get(model_type, "")


@cache
def causal_language_models() -> dict[str, str]:
    """Class by `model_type`; empty if the table is not where it was."""
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    file = Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py"
    table = _TABLE.search(file.read_text()) if file.is_file() else None
    return dict(_ENTRY.findall(table[1])) if table else {}
