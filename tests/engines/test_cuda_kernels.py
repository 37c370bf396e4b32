"""The kernels of the GPU engine: on a GPU where there is one, else in Triton's interpreter."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.engines.cuda_kernels import CHECKS, Place

ON_GPU = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which torch has only for GPUs")


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", CHECKS)
def test_kernel_on_the_gpu(name: str) -> None:
    CHECKS[name](Place(torch.device("cuda"), large=True))


@pytest.mark.skipif(ON_GPU, reason="the same is tested on the GPU")
def test_kernels_in_the_interpreter() -> None:
    """In a process of its own: whether kernels are compiled or interpreted is decided when they are imported."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.cuda_kernels", *CHECKS],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
