"""Where training computes, and where the engines of a run do."""

import torch

from asyncrl.config import Run


def training_device(wanted: str) -> torch.device:
    """`auto` is the first GPU where there is one."""
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted)


def rank_device(wanted: str, rank: int) -> torch.device:
    """A GPU for each rank on a machine, which becomes the process's first; a cluster may show each only its own."""
    device = training_device(wanted)
    if device.type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    return device


def engines_on_gpu(run: Run) -> bool:
    """Whether the engines of a run compute on a GPU, where there is one."""
    return run.engine.on_gpu(run.drafter, torch.cuda.is_available())
