"""Layout, buckets, digests and the shared-memory transport."""

import multiprocessing
import stat
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import StorageError, WeightSyncError
from asyncrl.types import Bucket, WeightManifest
from asyncrl.weights.flat import ODD, Flat, word_sums
from asyncrl.weights.manifest import ALIGNMENT, cut, digest_sums, digest_tensors, layout
from asyncrl.weights.transports.registry import digest_published, make_writer
from asyncrl.weights.transports.shared_memory import SharedMemoryWriter, mapped, read_tensors
from tests.support.full_disk import file_size_limit


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


@given(total=st.integers(0, 5000).map(lambda blocks: blocks * ALIGNMENT), limit=st.integers(1, 40))
def test_buckets_are_bounded_and_cover_every_byte_once(total: int, limit: int) -> None:
    parts = cut(total, limit * ALIGNMENT)
    assert all(0 < size <= limit * ALIGNMENT for _, size in parts)
    ends = [0, *(offset + size for offset, size in parts)]
    assert [offset for offset, _ in parts] == ends[:-1]
    assert ends[-1] == total


def test_a_bucket_must_be_aligned() -> None:
    with pytest.raises(ValueError, match="no multiple of 64"):
        cut(640, 100)


def _flat(*, word_sums: bool) -> Flat:
    weights = _weights()
    specs, total = layout(weights)
    flat = Flat(specs, torch.zeros(total, dtype=torch.uint8), word_sums=word_sums)
    for spec, (_, tensor) in zip(specs, weights, strict=True):
        flat.put(spec, tensor)
    return flat


@pytest.mark.parametrize("by_words", [False, True])
def test_each_flipped_bit_is_found_in_its_bucket(by_words: bool) -> None:
    flat = _flat(word_sums=by_words)
    buckets, digest = flat.seal(limit=128)
    assert [(bucket.offset, bucket.bytes) for bucket in buckets] == [(0, 128), (128, 128), (256, 64)]
    assert flat.missing(buckets) == []
    for place in range(0, len(flat.memory), 7):
        flat.memory[place] ^= 1 << place % 8
        assert flat.missing(buckets) == [buckets[place // 128]]
        inside = any(spec.offset <= place < spec.offset + spec.bytes for spec in flat.specs)
        assert (flat.digest() != digest) == (inside or by_words)  # gaps are in buckets and word sums only
        flat.memory[place] ^= 1 << place % 8
    assert flat.digest() == digest


def test_a_broken_transfer_goes_on_with_what_is_missing() -> None:
    source = _flat(word_sums=False)
    buckets, digest = source.seal(limit=64)
    target = Flat.empty(source.specs, len(source.memory))

    def transfer(wanted: list[Bucket]) -> None:
        for bucket in wanted:
            target.part(bucket).copy_(source.part(bucket))

    transfer(target.missing(buckets)[:2])
    left = target.missing(buckets)
    assert left == list(buckets[2:])
    transfer(left)
    assert target.missing(buckets) == []
    assert target.digest() == digest


def test_word_sums_are_those_of_the_definition() -> None:
    memory = torch.randint(0, 256, (640,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    words = [int.from_bytes(memory.numpy().tobytes()[start : start + 8], "little") for start in range(0, 640, 8)]
    products = [word * (place * ODD | 1) % 2**64 for place, word in enumerate(words)]
    assert word_sums(memory, [(0, 640)]) == [sum(products) % 2**64]
    assert word_sums(memory, [(0, 128), (128, 512)]) == [sum(products[:16]) % 2**64, sum(products[16:]) % 2**64]
    assert digest_sums((), [1, 2**64 - 2]).endswith("-ffffffffffffffff")


def test_a_flipped_bit_in_shared_memory_changes_the_digest_found() -> None:
    writer = SharedMemoryWriter(_weights, prefix="test")
    manifest = writer.publish(1)
    assert digest_published(manifest) == manifest.digest
    with Path(manifest.location).open("r+b") as file:
        file.seek(130)
        byte = file.read(1)[0]
        file.seek(130)
        file.write(bytes([byte ^ 4]))
    assert digest_published(manifest) != manifest.digest
    assert mapped(manifest).missing(manifest.buckets) == list(manifest.buckets)  # it has one
    again = writer.publish(1)
    assert (again.location, again.digest) == (manifest.location, manifest.digest)
    assert digest_published(manifest) == manifest.digest
    writer.close()


def test_versions_that_are_not_all_published_still_alternate() -> None:
    versions = iter([torch.zeros(4), torch.ones(4)])
    writer = SharedMemoryWriter(lambda: [("w", next(versions))], prefix="test")
    first, second = writer.publish(4), writer.publish(6)
    assert first.location != second.location
    assert dict(read_tensors(first))["w"].tolist() == [0.0] * 4
    writer.close()


def test_a_disk_without_room_for_a_publication_is_a_storage_error(tmp_path: Path) -> None:
    writer = make_writer(_weights, "file", prefix="test", folder=tmp_path / "weights", deadline_s=1, delta=False)
    with file_size_limit(100), pytest.raises(StorageError, match="make room and try again"):
        writer.publish(1)
    assert list((tmp_path / "weights").iterdir()) == []
    assert digest_published(writer.publish(1)) == digest_tensors(_weights())
    writer.close()
    (tmp_path / "weights").write_text("in the way")
    with pytest.raises(StorageError, match="weights"):
        writer.publish(2)
