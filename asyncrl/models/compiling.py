"""torch.compile for functions of tensors of any length."""

import logging
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

# Both are about choices made here on purpose: what a layer keeps, and a softmax over a long vocabulary in two passes.
logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", r"\s*Online softmax is disabled", UserWarning)

# A function is compiled again for frozen inputs, without gradients, for adapters: a process that trains several models
# does all of that. The default, 8, would end it.
torch.compiler.config.recompile_limit = 64


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled once for tensors of any length."""
    return torch.compile(function, dynamic=True, fullgraph=True)
