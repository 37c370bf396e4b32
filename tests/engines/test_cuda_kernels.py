"""The kernels of the GPU engine: on a GPU where there is one, else in Triton's interpreter."""

import asyncio
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.engines.native.cuda.engine import CudaEngine
from tests.engines.cuda_kernels import CHECKS, Place
from tests.precision.test_cuda_engine import QUANTIZED, answers, engine, in_turn
from tests.support import needs
from tests.support.driving import Answer, serving
from tests.support.fp8_publishing import publishing
from tests.support.tiny_model import tiny_checkpoint

ON_GPU = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton: make test-kernels")


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason=needs.GPU)
@pytest.mark.parametrize("name", CHECKS)
def test_kernel_on_the_gpu(name: str) -> None:
    CHECKS[name](Place(torch.device("cuda"), large=True))


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason=needs.GPU)
@pytest.mark.parametrize("precision", QUANTIZED)
def test_fp8_engine_on_the_gpu(precision: str, tmp_path: Path) -> None:
    """A sync changes what captured graphs compute: to what an engine computes that starts with those weights."""
    shape = {"hidden_size": 256, "intermediate_size": 640, "head_dim": 64}
    tiny_checkpoint(tmp_path / "old", **shape)
    tiny_checkpoint(tmp_path / "new", seed=1, **shape)

    def make(name: str, device: str = "cuda") -> CudaEngine:
        return engine(tmp_path / name, precision, dtype=torch.bfloat16, device=device)

    async def synced() -> tuple[list[Answer], list[Answer]]:
        async with serving(make("old")) as serves:
            before = await in_turn(serves)
            with publishing(tmp_path / "new", precision, "cuda", dtype=torch.bfloat16, kv_scales="engine") as new:
                await serves.load_weights(new.publish(1), "keep")
            return before, await in_turn(serves)

    before, after = asyncio.run(synced())
    for one, fresh in zip(after, answers(make("new")), strict=True):
        np.testing.assert_allclose(one.logprobs[0], fresh.logprobs[0], atol=1e-4)
    old, new = answers(make("old", "cpu")), answers(make("new", "cpu"))
    # Other sums have other last bits, and these turn the rounding of some numbers to FP8.
    assert max(_gap(before, old), _gap(after, new)) < 0.3


def _gap(found: list[Answer], expected: list[Answer]) -> float:
    """Mean over the first tokens' log-probabilities: later ones follow different texts."""
    return float(
        np.mean([abs(one.logprobs[0] - other.logprobs[0]) for one, other in zip(found, expected, strict=True)])
    )


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="the same is tested on the GPU")
def test_kernels_in_the_interpreter() -> None:
    """In a process of its own: whether kernels are compiled or interpreted is decided when they are imported."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.cuda_kernels", *CHECKS],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
