"""How often the host waits for a card: a wait in every layer, or for every tensor, leaves it idle as often."""

import warnings
from collections.abc import Callable

import torch


def waits(work: Callable[[], object]) -> int:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing CUDA operation" in str(warning.message) for warning in found)
