"""Where training computes."""

import torch


def training_device(wanted: str) -> torch.device:
    """`auto` is the first GPU where there is one."""
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted)
