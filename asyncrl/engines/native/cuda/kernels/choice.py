"""Which kernels a device runs."""

import torch

from asyncrl.engines.native.cuda.kernels import torch_kernels
from asyncrl.engines.native.cuda.kernels.shapes import Kernels


def kernels_of(device: torch.device) -> Kernels:
    if device.type == "cpu":
        return torch_kernels.KERNELS
    from asyncrl.engines.native.cuda.kernels import triton_kernels  # Triton comes with torch for GPUs only

    return triton_kernels.KERNELS
