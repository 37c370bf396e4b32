"""Broadcasts over a network that hangs, reports errors or loses a rank: each rank a thread, as NCCL's would be one."""

import threading
import time
from collections.abc import Callable

import msgspec
import pytest
import torch

from asyncrl.errors import WeightSyncError
from asyncrl.types import SendOrder, WeightManifest
from asyncrl.weights.transports.mirror import Mirror, MirrorWriter
from asyncrl.weights.transports.nccl import Link, NcclCarrier, NcclReceiver, Rendezvous
from asyncrl.weights.transports.registry import addressed_to

CPU = torch.device("cpu")
PATIENCE = 20.0
"""Longer than any test may take: a rank that waits so long has not noticed."""


class FakeNccl:
    """All ranks of all communicators. A fault strikes one rank of one epoch."""

    def __init__(self, fault: str = "", *, rank: int = 1, epoch: int = 1) -> None:
        self.fault, self._rank, self._epoch = fault, rank, epoch
        self.links: dict[str, list[FakeLink]] = {}
        self._ids = 0
        self._lock = threading.Condition()

    def unique_id(self) -> str:
        self._ids += 1
        return f"{self._ids:04x}"

    def strikes(self, meeting: Rendezvous, rank: int) -> str:
        return self.fault if (rank, meeting.epoch) == (self._rank, self._epoch) else ""

    def form(self, meeting: Rendezvous, rank: int, device: torch.device) -> Link:
        """As NCCL does: waits for the last rank, however long it takes."""
        if self.strikes(meeting, rank) == "forming fails":
            raise RuntimeError("no route to host")
        link = FakeLink(self, meeting, rank)
        with self._lock:
            self.links.setdefault(meeting.id, []).append(link)
            self._lock.notify_all()
            self._lock.wait_for(lambda: len(self.links[meeting.id]) == meeting.size, timeout=PATIENCE)
        return link


class FakeLink:
    def __init__(self, network: FakeNccl, meeting: Rendezvous, rank: int) -> None:
        self._network, self._meeting, self.rank = network, meeting, rank
        self._fault = network.strikes(meeting, rank)
        self.sent: list[torch.Tensor] = []
        self._received = 0
        self._targets: list[torch.Tensor] = []
        self.aborted = threading.Event()

    def broadcast(self, part: torch.Tensor) -> None:
        if self._fault == "enqueueing blocks":
            self.aborted.wait(PATIENCE)
            return
        self._targets.append(part)
        if self.rank == 0:
            self.sent.append(part)

    def done(self) -> bool:
        """One rank that fails, in whatever way, keeps the others in it: NCCL tells them nothing."""
        ranks = self._network.links[self._meeting.id]
        if any(link._fault for link in ranks):
            return False
        (root,) = (link for link in ranks if link.rank == 0)
        while self._received < min(len(self._targets), len(root.sent)):
            self._targets[self._received].copy_(root.sent[self._received])
            self._received += 1
        return self._received == len(self._targets)

    def check(self) -> None:
        if self._fault == "asynchronous error":
            raise WeightSyncError("NCCL reports a remote error")

    def abort(self) -> None:
        self.aborted.set()


class Engine:
    """A receiver with a mirror, in this process."""

    def __init__(self, name: str, network: FakeNccl) -> None:
        self.name = name
        self.mirror = Mirror()
        self._receiver = NcclReceiver(network, CPU)
        self.outcome: str | WeightSyncError | None = None
        self._thread = threading.Thread(target=lambda: None)

    def load(self, manifest: WeightManifest) -> None:
        self.outcome = None
        self._thread = threading.Thread(target=self._load, args=(addressed_to(manifest, self.name),), daemon=True)
        self._thread.start()

    def _load(self, manifest: WeightManifest) -> None:
        try:
            self.mirror.receive(manifest, self._receiver.bring)
            self.outcome = manifest.digest
        except WeightSyncError as error:
            self.outcome = error

    def wait(self) -> "str | WeightSyncError | None":
        self._thread.join(timeout=PATIENCE)
        return self.outcome


def _writer(network: FakeNccl, weights: Callable[[], torch.Tensor], *, deadline_s: float = 0.5) -> MirrorWriter:
    carrier = NcclCarrier(network, CPU, deadline_s=deadline_s)
    return MirrorWriter(lambda: [("w", weights())], carrier, sparse=True)


def _publish(writer: MirrorWriter, version: int, engines: list[Engine], order: SendOrder) -> WeightManifest:
    manifest = writer.publish(version, order)
    for engine in engines:
        engine.load(manifest)
    return manifest


@pytest.mark.parametrize("count", [1, 2])
def test_versions_arrive_over_one_communicator(count: int) -> None:
    network, weights = FakeNccl(), torch.arange(50_000.0)
    writer = _writer(network, lambda: weights, deadline_s=PATIENCE)
    engines = [Engine(f"e{number}", network) for number in range(count)]
    order = SendOrder(1, tuple(engine.name for engine in engines))
    for version in (1, 2, 3):
        weights[version] = -1.0
        manifest = _publish(writer, version, engines, order)
        assert (manifest.delta is not None) == (version > 1), "only what changed"
        assert [engine.wait() for engine in engines] == [manifest.digest] * count
    here = addressed_to(manifest, engines[-1].name)
    held = dict(engines[-1].mirror.receive(here, _never).tensors())["w"]
    assert torch.equal(held, weights)
    assert len(network.links) == 1
    writer.close()
    assert all(link.aborted.is_set() for link in network.links["0001"] if link.rank == 0)


def _never(manifest: WeightManifest, flat: object) -> None:
    raise AssertionError("it is here already")


FAULTS = ["hangs", "enqueueing blocks", "asynchronous error", "forming fails"]


@pytest.mark.parametrize("struck", [0, 1], ids=["the trainer", "an engine"])
@pytest.mark.parametrize("fault", FAULTS)
def test_every_rank_notices_and_the_next_epoch_delivers(fault: str, struck: int) -> None:
    network, weights = FakeNccl(fault, rank=struck), torch.arange(1000.0)
    writer = _writer(network, lambda: weights)
    engines = [Engine(name, network) for name in ("e0", "e1")]
    _publish(writer, 1, engines, SendOrder(1, ("e0", "e1")))
    began = time.monotonic()
    outcomes = [engine.wait() for engine in engines]
    assert all(isinstance(outcome, WeightSyncError) for outcome in outcomes), "nobody waits any more"
    assert time.monotonic() - began < PATIENCE / 2
    manifest = _publish(writer, 1, engines, SendOrder(2, ("e0", "e1"), dense=True))
    assert [engine.wait() for engine in engines] == [manifest.digest] * 2
    assert Rendezvous.at(manifest.location).epoch == 2
    if fault != "forming fails":
        assert all(link.aborted.is_set() for link in network.links["0001"]), "on the trainer's side as well"
    writer.close()


def test_a_lost_rank_keeps_nobody_waiting_and_the_others_go_on_without_it() -> None:
    network, weights = FakeNccl(), torch.arange(1000.0)
    writer = _writer(network, lambda: weights)
    alive = Engine("e0", network)
    _publish(writer, 1, [alive], SendOrder(1, ("e0", "dead")))
    outcome = alive.wait()
    assert isinstance(outcome, WeightSyncError)
    assert "epoch 1, rank 1 of 3: not every rank took part in the broadcast within 0.5 s" in str(outcome)
    manifest = _publish(writer, 1, [alive], SendOrder(2, ("e0",), dense=True))
    assert alive.wait() == manifest.digest
    writer.close()


def test_a_flipped_bit_on_the_way_is_refused_and_the_mirror_is_empty_then() -> None:
    network, weights = FakeNccl(), torch.arange(1000.0)
    writer = _writer(network, lambda: weights, deadline_s=PATIENCE)
    engine = Engine("e0", network)
    manifest = writer.publish(1, SendOrder(1, ("e0",)))
    wrong = msgspec.structs.replace(manifest.buckets[0], digest="0" * 16)
    engine.load(msgspec.structs.replace(manifest, buckets=(wrong,)))
    assert "1 of 1 buckets are not what was published" in str(engine.wait())
    weights[0] = 5.0
    _publish(writer, 2, [engine], SendOrder(1, ("e0",)))
    assert "and none is here; send every byte" in str(engine.wait())
    writer.close()


def test_a_manifest_for_others_is_refused() -> None:
    meeting = Rendezvous(id="00", epoch=1, members=("e0",), deadline_s=1.0)
    manifest = WeightManifest(version=3, tensors=(), total_bytes=0, digest="", location=meeting.location)
    with pytest.raises(WeightSyncError, match="version 3 is for e0, and not for e7"):
        addressed_to(manifest, "e7")
    assert Rendezvous.at(addressed_to(manifest, "e0").location).rank == 1
    plain = msgspec.structs.replace(manifest, location="/dev/shm/x")
    assert addressed_to(plain, "e7") == plain
