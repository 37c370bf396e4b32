"""What libraries say about themselves is not for the users of this one: their deprecations, hints and progress bars.

Errors and the warnings of the user's own code stay. `--verbose`, or ASYNCRL_VERBOSE=1, shows everything. Processes that
this one starts inherit the variables: in them the warnings of `PASSING` are hidden in all code, the user's too. Ray's
workers call `quieten` themselves, for the rest.
"""

import os
import warnings

VERBOSE = "ASYNCRL_VERBOSE"
LIBRARIES = ("hydra", "omegaconf", "ray", "torch", "vllm", "transformers")
PASSING = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)
"""Warnings to whoever writes the code that is warned of, wherever it is."""


def verbose() -> bool:
    return os.environ.get(VERBOSE, "") not in ("", "0")


def quieten() -> None:
    """From here on, in this process and in those that it starts."""
    if verbose():
        return
    if "PYTHONWARNINGS" not in os.environ:  # else the user has chosen, or the process that started this one
        os.environ["PYTHONWARNINGS"] = ",".join(f"ignore::{kind.__name__}" for kind in PASSING)
        for kind in PASSING:
            warnings.filterwarnings("ignore", category=kind)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", category=UserWarning, module=rf"({'|'.join(LIBRARIES)})(\.|$)")
