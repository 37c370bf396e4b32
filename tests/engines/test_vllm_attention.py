"""Our attention inside vLLM: `engine.attention=ASYNCRL`."""

import asyncio
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.config.drafter import DrafterSettings, NgramDrafter, NoDrafter
from asyncrl.config.engine import VllmEngine
from asyncrl.engines.vllm.build import build_vllm
from asyncrl.engines.vllm.environment import OWNER
from asyncrl.system.devices import has_gpu
from tests.support import needs
from tests.support.driving import LONG, Answer, ask, collect_all, serving
from tests.support.parity import gathered, reference_logits
from tests.support.real_vllm import TINY, needs_vllm
from tests.support.tiny_model import tiny_checkpoint

PROMPTS = LONG[:20], LONG[:63], LONG
"""Three rows in graphs for four; answers pass the ends of pages."""


@needs_vllm
def test_our_attention_is_vllms_custom_one(tmp_path: Path) -> None:
    from asyncrl.engines.vllm.options import engine_args

    tiny_checkpoint(tmp_path)
    chosen = engine_args(tmp_path, VllmEngine(attention="ASYNCRL"), NoDrafter(), "bf16").attention_backend
    assert chosen is not None
    assert chosen.name == "CUSTOM"


@needs_vllm
@pytest.mark.parametrize(
    ("settings", "drafter", "precision", "capability", "chosen"),
    [
        (VllmEngine(), NoDrafter(), "fp8_full", 90, "CUSTOM"),
        (VllmEngine(), NoDrafter(), "fp8_kv", 90, "CUSTOM"),
        (VllmEngine(kv_dtype="fp8"), NoDrafter(), "bf16", 90, "CUSTOM"),
        (VllmEngine(), NoDrafter(), "fp8", 90, None),
        (VllmEngine(), NoDrafter(), "bf16", 90, None),
        (VllmEngine(), NoDrafter(), "fp8_full", 100, None),
        (VllmEngine(), NgramDrafter(), "fp8_full", 90, None),
        (VllmEngine(attention="FLASH_ATTN"), NoDrafter(), "fp8_full", 90, "FLASH_ATTN"),
    ],
)
def test_it_is_chosen_by_itself_for_an_fp8_cache_on_hopper(
    settings: VllmEngine,
    drafter: DrafterSettings,
    precision: str,
    capability: int,
    chosen: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from asyncrl.engines.vllm import options

    tiny_checkpoint(tmp_path)
    monkeypatch.setattr(options.current_platform, "is_device_capability", lambda wanted: wanted == capability)
    backend = options.engine_args(tmp_path, settings, drafter, precision).attention_backend
    assert (backend and backend.name) == chosen


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


class Scales(NamedTuple):
    keys: Tensor
    values: Tensor
    queries: Tensor | None = None


class Routes:
    """Our attention with three requests of one token each, and which kernel took them; no kernel is needed for that."""

    def __init__(self, module: ModuleType) -> None:
        self.taken: list[tuple[Any, ...]] = []
        self.theirs = 0
        self.impl = module.Decoding(4, 32, 0.5, 2, None, None, "auto")
        self.query, self.output = torch.zeros(4, 4, 32), torch.zeros(4, 4, 32)
        self.cache = torch.zeros(5, 2, 64, 64)
        self.layer = SimpleNamespace(_q_scale=torch.ones(()), _k_scale=torch.ones(()), _v_scale=torch.ones(()))
        starts, lengths, slots = torch.arange(4), torch.tensor([1, 70, 0]), torch.zeros(3)
        self.batch = module.FlashAttentionMetadata(
            *(3, 1, starts, 70, lengths, torch.zeros(3, 2), slots, False, 0, None, None, None)
        )

    def run(self) -> bool:
        """Whether it was our kernel."""
        self.taken, self.theirs = [], 0
        keys = torch.zeros(4, 2, 32)
        self.impl.forward(self.layer, self.query, keys, keys, self.cache, self.batch, self.output)
        assert len(self.taken) + self.theirs == 1
        return bool(self.taken)


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> Routes:
    """Kernels need Triton, which is only there with a GPU, so others stand in for both."""
    name, kernel = "asyncrl.engines.vllm.attention", "asyncrl.engines.native.cuda.kernels.attention"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    del sys.modules[name]  # and again after the test, by which it has been imported
    stub: Any = ModuleType(kernel)
    stub.Scales, stub.attend_last = Scales, lambda *args: found.taken.append(args)
    monkeypatch.setitem(sys.modules, kernel, stub)
    found = Routes(import_module(name))

    def theirs(*_args: Any) -> None:
        found.theirs += 1

    monkeypatch.setattr("vllm.v1.attention.backends.flash_attn.FlashAttentionImpl.forward", theirs)
    return found


@needs_vllm
def test_a_batch_of_single_tokens_goes_to_our_kernel(routes: Routes) -> None:
    assert routes.run()
    query, cache, scales, lengths, table, scale, output = routes.taken[0]
    assert (query is routes.query, cache is routes.cache, output is routes.output) == (True, True, True)
    assert (lengths is routes.batch.seq_lens, table is routes.batch.block_table) == (True, True)
    assert (scales, scale) == (None, 0.5)


@needs_vllm
@pytest.mark.parametrize(
    ("whose", "name", "value"),
    [
        ("batch", "max_query_len", 2),
        ("batch", "use_cascade", True),
        ("batch", "causal", False),
        ("batch", "causal", torch.tensor([1, 1, 1])),
        ("batch", "sliding_window", (31, 0)),
        ("batch", "rswa_window", 128),
        ("batch", "mm_prefix_range_tensor", torch.zeros(3, 1, 2)),
        ("batch", "mm_prefix_query_range_tensor", torch.zeros(3, 2)),
        ("impl", "plain", False),
        ("routes", "batch", None),
        ("routes", "query", torch.zeros(4, 4, 64)[..., :32]),
        ("routes", "query", torch.zeros(4, 4, 32, dtype=torch.float16)),
        ("routes", "output", torch.zeros(4, 4, 64)[..., :32]),
    ],
)
def test_everything_else_is_flash_attentions(routes: Routes, whose: str, name: str, value: object) -> None:
    setattr(routes if whose == "routes" else getattr(routes, whose), name, value)
    assert not routes.run()


@needs_vllm
@pytest.mark.parametrize("others", [{"sliding_window": 32}, {"logits_soft_cap": 30.0}, {"alibi_slopes": [1.0] * 4}])
def test_a_layer_with_another_kind_of_attention_is_not_plain(routes: Routes, others: dict[str, Any]) -> None:
    given = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto", **others}
    layer: Any = type(routes.impl)(4, 32, 0.5, 2, **given)
    assert (routes.impl.plain, layer.plain) == (True, False)


@needs_vllm
def test_an_fp8_cache_comes_with_the_layers_scales(routes: Routes) -> None:
    routes.impl.kv_cache_dtype = "fp8"
    routes.cache = torch.zeros(5, 2, 64, 64, dtype=torch.uint8)
    layer = routes.layer
    assert routes.run()
    assert routes.taken[0][1].dtype == torch.float8_e4m3fn
    assert routes.taken[0][2] == (layer._k_scale, layer._v_scale, None)  # queries as they are
    routes.query = routes.query.to(torch.float8_e4m3fn)
    assert routes.run()
    assert routes.taken[0][2] == (layer._k_scale, layer._v_scale, layer._q_scale)
    layer._q_scale = torch.ones(2)  # one for each head
    assert not routes.run()


def _gap(
    path: Path,
    reference: PreTrainedModel,
    precision: str,
    name: Literal["auto", "ASYNCRL", "FLASH_ATTN"],
    *,
    eager: bool,
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
@pytest.mark.skipif(not has_gpu(), reason=needs.GPU)
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("precision", "name"), [("bf16", "ASYNCRL"), ("fp8_kv", "auto")])
def test_answers_are_as_near_to_the_models_as_with_vllms_attention(
    precision: str, name: Literal["auto", "ASYNCRL"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In captured graphs; our kernel was compiled, so it was not vLLM's that answered."""
    reference = tiny_checkpoint(tmp_path / "model", hidden_size=256, intermediate_size=640, head_dim=64)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "vllm"))
    theirs = _gap(tmp_path / "model", reference, precision, "FLASH_ATTN", eager=True)
    assert not list(tmp_path.rglob("_attend.cubin"))
    ours = _gap(tmp_path / "model", reference, precision, name, eager=False)
    assert list(tmp_path.rglob("_attend.cubin"))
    assert 0 < ours < 1.3 * theirs, (ours, theirs)
