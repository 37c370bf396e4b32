"""Our attention inside vLLM: `engine.attention=ASYNCRL`."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import pytest
from transformers import PreTrainedModel

from asyncrl.devices import has_gpu
from asyncrl.drafting.settings import NoDrafter
from asyncrl.engines.build import build_vllm
from asyncrl.engines.settings import VllmEngine
from asyncrl.engines.vllm.environment import OWNER
from tests.engines.driving import LONG, Answer, ask, collect_all, serving
from tests.engines.parity import gathered, reference_logits
from tests.engines.vllm import TINY, needs_vllm
from tests.tiny_model import tiny_checkpoint

PROMPTS = LONG[:20], LONG[:63], LONG
"""Three rows in graphs for four; answers pass the ends of pages."""


@needs_vllm
def test_our_attention_is_vllms_custom_one(tmp_path: Path) -> None:
    from asyncrl.engines.vllm.options import engine_args

    tiny_checkpoint(tmp_path)
    chosen = engine_args(tmp_path, VllmEngine(attention="ASYNCRL"), NoDrafter(), "bf16").attention_backend
    assert chosen is not None
    assert chosen.name == "CUSTOM"


WORKER = """
import sys
import asyncrl.engines.vllm.worker
from vllm.v1.attention.backends.registry import AttentionBackendEnum
print(AttentionBackendEnum.CUSTOM.get_path(), "asyncrl.engines.vllm.attention" in sys.modules)
"""


@needs_vllm
def test_a_worker_knows_our_attention_and_imports_it_only_when_it_is_chosen() -> None:
    """In a process of its own, as a worker is; there, the module ends its process with the owner's."""
    found = subprocess.run(
        [sys.executable, "-c", WORKER],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {OWNER: str(os.getpid()), "VLLM_LOGGING_LEVEL": "ERROR"},
        timeout=200,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.split()[-2:] == ["asyncrl.engines.vllm.attention.Backend", "False"]
    assert (Path(__file__).parents[2] / "asyncrl/engines/vllm/attention.py").exists()


def _gap(
    path: Path, reference: PreTrainedModel, precision: str, name: Literal["ASYNCRL", "TRITON_ATTN"], *, eager: bool
) -> float:
    """Mean distance of an answer's log-probabilities to the model's in fp32."""
    settings = msgspec.structs.replace(TINY, attention=name, eager=eager)

    async def scenario() -> list[Answer]:
        async with serving(build_vllm(path, settings, NoDrafter(), name="vllm", precision=precision)) as engine:
            return await collect_all(engine, [ask(str(i), p, max_tokens=200) for i, p in enumerate(PROMPTS)])

    gaps: list[float] = []
    for prompt, answer in zip(PROMPTS, asyncio.run(scenario()), strict=True):
        expected = gathered(reference_logits(reference, ask("a", prompt), answer), answer.tokens)
        gaps += np.abs(answer.logprobs - expected).tolist()
    return float(np.mean(gaps))


@pytest.mark.gpu
@needs_vllm
@pytest.mark.skipif(not has_gpu(), reason="needs a CUDA GPU")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("precision", ["bf16", "fp8_kv"])
def test_answers_are_as_near_to_the_models_as_with_vllms_attention(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In captured graphs and without; our kernel was compiled, so it was not vLLM's that answered."""
    reference = tiny_checkpoint(tmp_path / "model", hidden_size=256, intermediate_size=640, head_dim=64)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "vllm"))
    theirs = _gap(tmp_path / "model", reference, precision, "TRITON_ATTN", eager=True)
    assert not list(tmp_path.rglob("_attend.cubin"))
    ours = [_gap(tmp_path / "model", reference, precision, "ASYNCRL", eager=eager) for eager in (True, False)]
    assert list(tmp_path.rglob("_attend.cubin"))
    assert 0 < max(ours) < 1.3 * theirs, (ours, theirs)
