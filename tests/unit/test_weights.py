"""Layout, digest and the shared-memory transport."""

import multiprocessing
import stat
from pathlib import Path

import pytest
import torch

from asyncrl.errors import WeightSyncError
from asyncrl.types import WeightManifest
from asyncrl.weights.manifest import ALIGNMENT, digest_tensors, layout
from asyncrl.weights.shared_memory import SharedMemoryWriter, read_tensors


def _weights() -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(0)
    fused = torch.randn(6, 5)
    return [("q", fused[:4]), ("k", fused[4:]), ("norm", torch.ones(3, dtype=torch.bfloat16)), ("t", fused.T[1:3])]


def test_layout_is_aligned_and_without_overlap():
    specs, total = layout(_weights())
    assert [spec.bytes for spec in specs] == [80, 40, 6, 48]
    assert [spec.offset for spec in specs] == [0, 128, 192, 256]
    assert total == 320
    assert all(spec.offset % ALIGNMENT == 0 for spec in specs)


def test_digest_sees_every_byte_name_and_shape():
    weights = _weights()
    digest = digest_tensors(weights)
    changed = [(name, tensor.clone()) for name, tensor in weights]
    changed[0][1].view(-1).view(torch.uint8)[7] ^= 1
    assert digest_tensors(changed) != digest
    assert digest_tensors([("p", weights[0][1]), *weights[1:]]) != digest
    assert digest_tensors([("q", weights[0][1].reshape(2, 10)), *weights[1:]]) != digest


def _receive(manifest: WeightManifest, answers: "multiprocessing.Queue[str]") -> None:
    answers.put(digest_tensors((name, tensor.clone()) for name, tensor in read_tensors(manifest)))


def test_another_process_reads_exactly_what_was_published():
    writer = SharedMemoryWriter(_weights, prefix="test")
    manifest = writer.publish(3)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    child = context.Process(target=_receive, args=(manifest, answers))
    child.start()
    assert answers.get(timeout=60) == manifest.digest
    child.join()
    path = Path(manifest.location)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    writer.close()
    assert not path.parent.exists()


def test_the_version_before_stays_readable_while_the_next_is_written():
    versions = iter([torch.zeros(4), torch.ones(4)])
    writer = SharedMemoryWriter(lambda: [("w", next(versions))], prefix="test")
    first, second = writer.publish(1), writer.publish(2)
    assert dict(read_tensors(first))["w"].tolist() == [0.0] * 4
    assert dict(read_tensors(second))["w"].tolist() == [1.0] * 4
    writer.close()


def test_missing_weights_are_an_error_that_names_the_place():
    writer = SharedMemoryWriter(_weights, prefix="test")
    manifest = writer.publish(1)
    writer.close()
    with pytest.raises(WeightSyncError, match="version 1"):
        dict(read_tensors(manifest))
