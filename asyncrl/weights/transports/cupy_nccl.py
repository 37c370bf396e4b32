"""NCCL by way of cupy, which unlike torch lets one process leave a group and form another."""

from typing import Any

import torch

from asyncrl.errors import WeightSyncError
from asyncrl.system.optional import require
from asyncrl.weights.transports.nccl import Link, Rendezvous

OLDEST_SHARED = 23000
"""From 2.30 on, with NCCL_MULTI_RANK_GPU_ENABLE=1, several ranks may share one card."""


def nccl() -> Any:
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
