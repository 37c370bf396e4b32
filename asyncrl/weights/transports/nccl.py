"""Weights through NCCL: the trainer broadcasts its flat buffer into the mirrors of all engines at once.

NCCL knows no failure: a collective whose peer died or hangs simply never ends, on any rank, and forming a communicator
waits for the last member just so. What works is to abort: the communicator is lost, with it everything that waits in
it, and a new one is formed without whoever failed (epochs.py decides that). So, on each side:

- whatever may block (forming, enqueueing) runs in a thread that can be left behind, on a CUDA stream of its own;
- the caller watches it: it asks NCCL for asynchronous errors, polls an event instead of waiting for the stream, and
  aborts at the first error or at the deadline;
- a session (one communicator) that failed is never used again.

All ranks meet by a unique id, which the trainer makes and which travels in the manifest's location. `Network` and
`Link` are the little of NCCL that is needed; the real ones are cupy's, which unlike torch lets one process leave a
group and form another. Tests have others, that fail on purpose.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Protocol

import msgspec
import torch

from asyncrl.errors import WeightSyncError
from asyncrl.system.optional import require
from asyncrl.types import SendOrder, WeightManifest
from asyncrl.weights.flat import Flat
from asyncrl.weights.gather import Tensors
from asyncrl.weights.transports.base import Transport, WriterOptions
from asyncrl.weights.transports.mirror import Mirror, MirrorWriter

SCHEME = "nccl:"
POLL_SECONDS = 0.001


class Nccl(Transport):
    """The trainer broadcasts; receivers hold a copy of the newest publication on their card."""

    scheme = SCHEME
    verifies = True
    joinable = False

    def writer(self, tensors: Tensors, options: WriterOptions) -> MirrorWriter:
        carrier = NcclCarrier(CupyNccl(), _card(), deadline_s=options.deadline_s)
        return MirrorWriter(tensors, carrier, sparse=options.delta, device=_card())

    def read(self, manifest: WeightManifest) -> Flat:
        return self._mirror.receive(manifest, self._receiver.bring)

    def addressed(self, manifest: WeightManifest, name: str) -> str:
        """It says which rank the receiver is."""
        meeting = Rendezvous.at(manifest.location)
        if name not in meeting.members:
            raise WeightSyncError(f"version {manifest.version} is for {', '.join(meeting.members)}, and not for {name}")
        return msgspec.structs.replace(meeting, rank=1 + meeting.members.index(name)).location

    @cached_property
    def _mirror(self) -> Mirror:
        return Mirror(_card())

    @cached_property
    def _receiver(self) -> "NcclReceiver":
        return NcclReceiver(CupyNccl(), _card())


def _card() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how the ranks of one communicator meet: what a location of ours says."""

    id: str
    """NCCL's unique id, in hex."""
    epoch: int
    members: tuple[str, ...]
    """Rank 0 is the trainer; these are the ranks from 1 on."""
    deadline_s: float
    number: int = 0
    """Of the broadcast in this communicator: no two have the same location."""
    rank: int | None = None
    """The receiver's own, once the location is addressed to it."""

    @property
    def size(self) -> int:
        return len(self.members) + 1

    @property
    def location(self) -> str:
        return SCHEME + msgspec.json.encode(self).decode()

    @classmethod
    def at(cls, location: str) -> "Rendezvous":
        return msgspec.json.decode(location.removeprefix(SCHEME), type=cls)


class Link(Protocol):
    """A communicator that has been formed."""

    def broadcast(self, part: torch.Tensor) -> None:
        """Enqueue; from rank 0 into the same place on every other."""
        ...

    def done(self) -> bool:
        """Whether everything enqueued has happened."""
        ...

    def check(self) -> None:
        """Raise WeightSyncError if NCCL has noticed an error."""
        ...

    def abort(self) -> None: ...


class Network(Protocol):
    """Where links come from."""

    def unique_id(self) -> str: ...

    def form(self, meeting: Rendezvous, rank: int, device: torch.device) -> Link:
        """Returns when all ranks have come."""
        ...


class Session:
    """One communicator for as long as nothing fails in it."""

    def __init__(self, meeting: Rendezvous, rank: int, device: torch.device, network: Network) -> None:
        self.meeting = meeting
        self._rank, self._device, self._network = rank, device, network
        self._link: Link | None = None
        self._failure = ""

    @property
    def failed(self) -> bool:
        return bool(self._failure)

    def broadcast(self, parts: Sequence[torch.Tensor]) -> None:
        """Returns when all parts are sent or received; past the deadline, or at an error, the session is over."""
        if self._failure:
            raise WeightSyncError(self._failure)
        outcome = _Outcome()
        threading.Thread(target=outcome.run, args=(self._transfer, parts), name="nccl", daemon=True).start()
        deadline = time.monotonic() + self.meeting.deadline_s
        try:
            while not outcome.ended.wait(POLL_SECONDS):
                if (link := self._link) is not None:
                    link.check()
                if time.monotonic() > deadline:
                    raise WeightSyncError(
                        f"not every rank took part in the broadcast within {self.meeting.deadline_s:g} s"
                    )
            if outcome.error is not None:
                raise outcome.error
        except WeightSyncError as error:
            self.abort(f"epoch {self.meeting.epoch}, rank {self._rank} of {self.meeting.size}: {error}")
            raise WeightSyncError(self._failure) from None

    def abort(self, reason: str) -> None:
        """End it for good; whoever waits in it returns."""
        self._failure = self._failure or reason
        link, self._link = self._link, None
        if link is not None:
            link.abort()

    def _transfer(self, parts: Sequence[torch.Tensor]) -> None:
        if self._link is None:
            link = self._network.form(self.meeting, self._rank, self._device)
            if self._failure:  # the others came too late
                link.abort()
                return
            self._link = link
        link = self._link
        for part in parts:
            link.broadcast(part)
        while not self._failure and not link.done():
            time.sleep(POLL_SECONDS)


class _Outcome:
    """Of a thread that somebody watches."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error: WeightSyncError | None = None

    def run(self, work: Callable[[Sequence[torch.Tensor]], None], parts: Sequence[torch.Tensor]) -> None:
        try:
            work(parts)
        except WeightSyncError as error:
            self.error = error
        except Exception as error:  # nobody else would hear of it
            self.error = WeightSyncError(repr(error))
        finally:
            self.ended.set()


class NcclCarrier:
    """The trainer's side. Sending goes on while the trainer does; the next publication waits for it."""

    def __init__(self, network: Network, device: torch.device, *, deadline_s: float) -> None:
        self._network, self._device, self._deadline_s = network, device, deadline_s
        self._session: Session | None = None
        self._sending: threading.Thread | None = None
        self._sent = 0

    def send(self, manifest: WeightManifest, flat: Flat, order: SendOrder) -> str:
        session = self._session_for(order)
        self._sent += 1
        parts = [flat.part(bucket) for bucket in manifest.buckets]
        self._sending = threading.Thread(target=_send, args=(session, parts), name="nccl-send", daemon=True)
        self._sending.start()
        return msgspec.structs.replace(session.meeting, number=self._sent).location

    def _session_for(self, order: SendOrder) -> Session:
        """The one of the version before, while its group is the same and nothing has failed in it."""
        old = self._session
        if old is not None:
            if old.meeting.epoch != order.epoch:
                old.abort(f"epoch {order.epoch} has begun")
            if self._sending is not None:
                self._sending.join()  # it ends within the session's deadline
            if not old.failed and old.meeting.members == order.members:
                return old
            old.abort("its group has changed")
        meeting = Rendezvous(
            id=self._network.unique_id(), epoch=order.epoch, members=order.members, deadline_s=self._deadline_s
        )
        self._session = Session(meeting, 0, self._device, self._network)
        return self._session

    def close(self) -> None:
        if self._session is not None:
            self._session.abort("the trainer is closed")


def _send(session: Session, parts: Sequence[torch.Tensor]) -> None:
    """A failure is kept by the session; the receivers, who do not acknowledge then, are the ones who tell of it."""
    with suppress(WeightSyncError):
        session.broadcast(parts)


class NcclReceiver:
    """An engine's side, one per process."""

    def __init__(self, network: Network, device: torch.device) -> None:
        self._network, self._device = network, device
        self._session: Session | None = None

    def bring(self, manifest: WeightManifest, flat: Flat) -> None:
        meeting = Rendezvous.at(manifest.location)
        if meeting.rank is None:
            raise WeightSyncError(f"version {manifest.version} is for {', '.join(meeting.members)}, and not for me")
        old = self._session
        if old is None or old.failed or old.meeting.id != meeting.id:
            if old is not None:
                old.abort(f"epoch {meeting.epoch} has begun")
            self._session = Session(meeting, meeting.rank, self._device, self._network)
        assert self._session is not None
        if flat.memory.is_cuda:  # our stream does not wait for torch's, which may still clear or read this memory
            torch.cuda.current_stream(flat.memory.device).synchronize()
        self._session.broadcast([flat.part(bucket) for bucket in manifest.buckets])


def nccl() -> Any:
    """cupy's bindings."""
    require("cupy", extra="nccl")
    return require("cupy.cuda.nccl", extra="nccl")


class CupyNccl:
    """The real network."""

    def unique_id(self) -> str:
        return nccl().get_unique_id().hex()

    def form(self, meeting: Rendezvous, rank: int, device: torch.device) -> Link:
        return CupyLink(meeting, rank, device.index or 0)


class CupyLink:
    def __init__(self, meeting: Rendezvous, rank: int, card: int) -> None:
        self._cuda: Any = require("cupy", extra="nccl").cuda
        self._nccl, self._card = nccl(), card
        self._comm: Any = None
        with self._cuda.Device(card):
            self._comm = self._nccl.NcclCommunicator(meeting.size, bytes.fromhex(meeting.id), rank)
            self._stream = self._cuda.Stream(non_blocking=True)
            self._event = self._cuda.Event(disable_timing=True)

    def broadcast(self, part: torch.Tensor) -> None:
        pointer, comm = part.data_ptr(), self._comm
        if comm is None:
            return
        with self._cuda.Device(self._card):
            comm.broadcast(pointer, pointer, len(part), self._nccl.NCCL_UINT8, 0, self._stream.ptr)
            self._event.record(self._stream)

    def done(self) -> bool:
        with self._cuda.Device(self._card):
            return self._event.done

    def check(self) -> None:
        if (comm := self._comm) is None:
            return
        try:
            comm.check_async_error()
        except (self._nccl.NcclError, KeyError) as error:  # cupy has no name for the newer error codes
            raise WeightSyncError(f"NCCL reports {error!r}") from None

    def abort(self) -> None:
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.abort()
