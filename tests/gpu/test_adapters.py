"""LoRA adapters on a card: what the kernels merge into a served model, in bf16 and in FP8, and nothing waits for it."""

import asyncio
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from asyncrl.config import Rollout, Run, Trainer
from asyncrl.config.engine import NativeEngine as Settings
from asyncrl.config.precision import Fp8, numerics
from asyncrl.config.trainer import Lora
from asyncrl.engines.native.cuda.engine import CudaEngine
from asyncrl.engines.native.weight_loading import Receiver
from asyncrl.models import lora
from asyncrl.models.checkpoint import load_model
from asyncrl.models.names import hf_tensors
from asyncrl.precision.layers import SCALES
from asyncrl.precision.publication import Fp8Publication
from asyncrl.precision.quantizer import WEIGHT_BLOCK, Quantized, dequantize, quantize
from tests.support import needs
from tests.support.adapters import publishing_adapters
from tests.support.driving import serving
from tests.support.gpu_waits import waits
from tests.support.tiny_model import tiny_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=needs.GPU),
]
SHAPE = {"hidden_size": 256, "intermediate_size": 640, "head_dim": 64, "num_hidden_layers": 3}
LORA = Lora(rank=16, alpha=8.0)
SETTINGS = Settings(max_batch=8, max_length=256, device="cuda", graph_memory_gib=0.25)
WHO = Receiver("test", "version 0", "model")


def _merged(path: Path, adapters: dict[str, Tensor]) -> dict[str, Tensor]:
    """In bf16, as the engine serves."""
    base, _ = load_model(path, torch.bfloat16)
    return dict(lora.merged_tensors(hf_tensors(base), adapters))


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8_full"])
def test_what_is_served_is_the_base_with_the_newest_adapters(precision: str, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, **SHAPE)
    run = Run(rollout=Rollout(precision=precision), engine=SETTINGS, trainer=Trainer(lora=LORA))  # type: ignore[arg-type]
    found = numerics(precision, Fp8())
    made = CudaEngine(tmp_path, SETTINGS, name="cuda", dtype=torch.bfloat16, numerics=found, adapted=LORA.targets)

    async def served() -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
        with publishing_adapters(tmp_path, LORA) as publish:
            meant = Fp8Publication(run, publish.trainer.model.config)
            async with serving(made) as engine:
                for version in (1, 3, 2):
                    manifest = publish(version)
                    fp8 = meant.of(publish.trainer.model)()
                    ack = await engine.load_weights(msgspec.structs.replace(manifest, fp8=fp8), "keep")
                    assert ack.digest == manifest.digest
                adapters = {
                    name: tensor
                    for module, _, each in publish.trainer.model.adapted()
                    for name, tensor in ((module + lora.A, each.A.detach()), (module + lora.B, each.scaled().detach()))
                }
                held = {name: tensor.clone() for name, tensor in made._intake.held.items()}
                checked = made._intake.check(msgspec.structs.replace(manifest, fp8=fp8), WHO)
                with made._timeline.work():
                    checked.update.load()
                    count = waits(checked.update.load)
                return held, adapters, count

    held, adapters, count = asyncio.run(served())
    assert count == 0
    for name, expected in _merged(tmp_path, adapters).items():
        if name + SCALES in held:
            values, scales = held[name].cpu(), held[name + SCALES].cpu()
            back, wanted = (
                dequantize(Quantized(values, scales, WEIGHT_BLOCK)),
                dequantize(quantize(expected, WEIGHT_BLOCK)),
            )
            assert float((back - wanted).norm() / wanted.norm()) < 0.01, name
        else:
            torch.testing.assert_close(held[name].cpu(), expected, rtol=0.01, atol=0.005, msg=name)
