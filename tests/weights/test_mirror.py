"""Files and sparse deltas into a receiver's mirror."""

import stat
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import WeightSyncError
from asyncrl.types import SendOrder, WeightManifest
from asyncrl.weights.flat import Flat
from asyncrl.weights.manifest import digest_tensors, layout
from asyncrl.weights.transports import file, mirror
from asyncrl.weights.transports.mirror import Mirror, MirrorWriter
from asyncrl.weights.transports.registry import digest_published, read_published, to_file
from asyncrl.weights.transports.shared_memory import SharedMemoryWriter

DENSE = SendOrder(dense=True)


class Policy:
    """Some weights that move a little."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tensors = {
            "embed": torch.randn(100, 16, generator=generator).to(torch.bfloat16),
            "norm": torch.randn(7, generator=generator),
        }

    def named(self):
        return ((name, tensor) for name, tensor in self.tensors.items())

    def move(self, count: int) -> None:
        self.tensors["embed"].view(-1)[:count] += 1


@pytest.fixture
def policy() -> Policy:
    return Policy()


def _writer(policy: Policy, folder: Path, *, sparse: bool = True) -> MirrorWriter:
    return MirrorWriter(policy.named, file.FileCarrier(folder), sparse=sparse)


def _holds(mirror: Mirror, manifest: WeightManifest, policy: Policy) -> bool:
    held = dict(mirror.receive(manifest, file.bring).tensors())
    return all(torch.equal(held[name], tensor) for name, tensor in policy.named()) and len(held) == 2


def test_a_file_is_whole_private_and_holds_the_version(policy: Policy, tmp_path: Path) -> None:
    writer, mirror = _writer(policy, tmp_path / "weights"), Mirror()
    manifests: list[WeightManifest] = []
    for version in (1, 2, 3):
        policy.move(1600)
        manifests.append(writer.publish(version, DENSE))
        assert _holds(mirror, manifests[-1], policy)
        assert manifests[-1].digest == digest_tensors(policy.named())
    found = sorted((tmp_path / "weights").iterdir())
    assert [path.suffix for path in found] == [".safetensors"] * 2, "the last two, and nothing half written"
    assert {stat.S_IMODE(path.stat().st_mode) for path in found} == {0o600}
    assert stat.S_IMODE((tmp_path / "weights").stat().st_mode) == 0o700
    writer.close()
    assert not (tmp_path / "weights").exists()


def test_only_what_changed_is_sent(policy: Policy, tmp_path: Path) -> None:
    writer, mirror = _writer(policy, tmp_path), Mirror()
    assert _holds(mirror, writer.publish(1), policy)
    policy.move(10)
    sparse = writer.publish(2)
    assert sparse.delta is not None
    assert sparse.delta.total_bytes == 128  # ten places of 4 bytes and ten values of 2, each aligned
    assert {spec.name for spec in sparse.delta.tensors} == {"embed#indices", "embed#values"}
    assert sparse.digest == digest_tensors(policy.named())
    assert _holds(mirror, sparse, policy)
    unchanged = writer.publish(3)
    assert unchanged.delta is not None
    assert unchanged.delta.total_bytes == 0
    assert _holds(mirror, unchanged, policy)
    policy.move(1600)
    assert writer.publish(4).delta is None, "every byte is smaller"


def test_changes_to_another_base_are_refused_and_every_byte_helps(policy: Policy, tmp_path: Path) -> None:
    writer, late = _writer(policy, tmp_path), Mirror()
    first = writer.publish(1)
    policy.move(3)
    second = writer.publish(2)
    with pytest.raises(WeightSyncError, match=f"changes to weights with digest {first.digest}, and none is here"):
        late.receive(second, file.bring)
    dense = writer.publish(2, DENSE)
    assert dense.delta is None
    assert dense.digest == second.digest
    assert _holds(late, dense, policy)
    policy.move(3)
    assert _holds(late, writer.publish(3), policy), "it follows from there on"


def test_a_bad_delta_leaves_the_mirror_as_it_was(policy: Policy, tmp_path: Path) -> None:
    writer, mirror = _writer(policy, tmp_path), Mirror()
    mirror.receive(writer.publish(1), file.bring)
    policy.move(3)
    sparse = writer.publish(2)
    assert sparse.delta is not None
    path = Path(sparse.delta.location.removeprefix(file.SCHEME))
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(WeightSyncError, match="version 2: 1 of 1 buckets are not what was published"):
        mirror.receive(sparse, file.bring)
    path.write_bytes(content)
    assert _holds(mirror, sparse, policy)


def test_a_half_received_version_is_nothing_to_build_on(policy: Policy, tmp_path: Path) -> None:
    writer, mirror = _writer(policy, tmp_path), Mirror()
    first = writer.publish(1)
    path = Path(first.location.removeprefix(file.SCHEME))
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(WeightSyncError, match="buckets are not what was published"):
        mirror.receive(first, file.bring)
    policy.move(3)
    with pytest.raises(WeightSyncError, match="none is here"):
        mirror.receive(writer.publish(2), file.bring)


def test_a_missing_or_cut_file_is_an_error_that_names_it(policy: Policy, tmp_path: Path) -> None:
    manifest = _writer(policy, tmp_path).publish(1)
    path = Path(manifest.location.removeprefix(file.SCHEME))
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(WeightSyncError, match=f"version 1 cannot be read from {path}"):
        Mirror().receive(manifest, file.bring)
    path.unlink()
    with pytest.raises(WeightSyncError, match=f"version 1 cannot be read from {path}"):
        Mirror().receive(manifest, file.bring)


def test_a_late_replica_gets_the_same_version_from_whoever_can_read_it(policy: Policy, tmp_path: Path) -> None:
    writer = SharedMemoryWriter(policy.named, prefix="test")
    manifest = writer.publish(5)
    late = to_file(manifest, tmp_path)
    writer.close()
    assert (late.version, late.digest) == (5, manifest.digest)
    assert digest_published(late) == manifest.digest
    assert all(torch.equal(t, policy.tensors[name]) for name, t in read_published(late, torch.device("cpu")))


def _flat(values: torch.Tensor) -> Flat:
    named = {"a": values[:3], "b": values[3:].reshape(1, -1)}
    specs, total = layout(named.items())
    flat = Flat.empty(specs, total)
    for spec in specs:
        flat.put(spec, named[spec.name])
    return flat


@given(
    st.sampled_from([torch.bfloat16, torch.float32, torch.uint8, torch.float64]),
    st.lists(st.tuples(st.integers(0, 255), st.integers(0, 255)), min_size=64, max_size=64),
    st.integers(0, 64),
)
def test_any_bits_come_through(dtype: torch.dtype, bytes_of_both: list[tuple[int, int]], same: int) -> None:
    """Also those of NaN, infinities and minus zero."""
    old, new = (torch.tensor([pair[side] for pair in bytes_of_both], dtype=torch.uint8) for side in (0, 1))
    new[:same] = old[:same]
    before, after = _flat(old.view(dtype)), _flat(new.view(dtype))
    changed = mirror.changes(before, after)
    if changed is None:
        return
    assert sum(tensor.numel() * tensor.element_size() for tensor in changed.values()) < len(after.memory)
    mirror.apply(before, changed.items())
    assert torch.equal(before.memory, after.memory)


def test_minus_zero_is_a_change() -> None:
    zero = torch.zeros(64)
    changed = mirror.changes(_flat(zero), _flat(torch.cat([-zero[:1], zero[1:]])))
    assert changed is not None
    assert changed["a#indices"].tolist() == [0]
    assert torch.signbit(changed["a#values"]).tolist() == [True]
