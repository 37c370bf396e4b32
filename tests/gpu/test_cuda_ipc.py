"""Weights through CUDA IPC between two processes on one card."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from tests.support import needs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=needs.GPU),
]
READER = """
import sys, msgspec, torch
from asyncrl.types import WeightManifest
from asyncrl.weights.transports.registry import digest_published, read_published
from tests.support import needs
manifest = msgspec.json.decode(sys.stdin.read(), type=WeightManifest)
print(digest_published(manifest))
for name, tensor in read_published(manifest, torch.device("cuda")):
    print(name, tuple(tensor.shape), tensor.dtype, float(tensor.double().sum()))
"""


def test_another_process_reads_what_was_published() -> None:
    from asyncrl.weights.transports.registry import make_writer

    generator = torch.Generator("cuda").manual_seed(0)
    tensors = {
        "a": torch.randn(1000, 37, device="cuda", generator=generator),
        "b": torch.randn(5, device="cuda", generator=generator).to(torch.bfloat16),
        "c": torch.randn(40_000_003, device="cuda", generator=generator),  # longer than one chunk of the digest
    }
    writer = make_writer(lambda: tensors.items(), "cuda_ipc", prefix="test")
    digests: list[str] = []
    for version in (1, 2, 3):
        tensors["a"] += 1
        manifest = writer.publish(version)
        output = _read(msgspec.json.encode(manifest).decode())
        expected = [f"{n} {tuple(t.shape)} {t.dtype} {float(t.double().sum())}" for n, t in tensors.items()]
        assert output == [manifest.digest, *expected]
        digests.append(manifest.digest)
    assert len(set(digests)) == 3
    tensors["c"][12345] += 1e-3  # one number of forty million
    assert writer.publish(5).digest not in digests
    writer.close()


def _read(manifest: str) -> list[str]:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", READER], input=manifest, capture_output=True, text=True, cwd=root, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
