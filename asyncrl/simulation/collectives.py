"""Seconds of collectives: bytes over bandwidths, and hops.

A group has `here` ranks in each of its nodes. What comes from them passes the links inside the node, what comes from
other nodes the network cards of those `here` ranks. Both go on at the same time, so the slower of the two counts.
One rank has nobody to talk to, and costs nothing.
"""

from math import ceil, log2
from typing import NamedTuple, Self

from asyncrl.simulation.hardware import Hardware, Reached


class Links(NamedTuple):
    """What collectives get of the hardware."""

    node: int
    inside: float
    between: float
    hop_inside: float
    hop_between: float

    @classmethod
    def of(cls, hardware: Hardware, reached: Reached) -> Self:
        inside, between = hardware.inside * reached.network, hardware.between * reached.network
        return cls(hardware.node, inside, between, hardware.hop_inside, hardware.hop_between)

    def _here(self, ranks: int, stride: int) -> int:
        return min(ranks, max(1, self.node // stride))

    def gather(self, size: float, ranks: int, stride: int = 1) -> float:
        """All-gather: every rank has its part of `size` bytes and gets the others. A reduce-scatter takes as long.
        `stride`: only every so many-th rank of the cluster is in the group.

        In a ring, as NCCL does it: through all ranks of a node, then to the next.
        """
        if ranks == 1:
            return 0.0
        here = self._here(ranks, stride)
        nodes = ceil(ranks / here)
        inside = size * (ranks - 1) / ranks / self.inside if here > 1 else 0.0
        between = size * (1 - here / ranks) / (here * self.between)
        return max(inside, between) + (ranks - nodes) * self.hop_inside + (nodes - 1) * self.hop_between

    def reduce(self, size: float, ranks: int) -> float:
        """All-reduce: everybody gets the sum of everybody's `size` bytes. Two gathers' bytes; all ranks of a node
        reach each other directly, and nodes are a tree, as for the few bytes of a decoding step."""
        if ranks == 1:
            return 0.0
        here = self._here(ranks, 1)
        nodes = ceil(ranks / here)
        inside = 2 * size * (ranks - 1) / ranks / self.inside
        between = 2 * size * (1 - here / ranks) / (here * self.between)
        return max(inside, between) + 2 * self.hop_inside + 2 * log2(nodes) * self.hop_between

    def exchange(self, size: float, ranks: int) -> float:
        """All-to-all: every rank has `size` bytes, as many for each."""
        if ranks == 1:
            return 0.0
        here = self._here(ranks, 1)
        inside = size * (here - 1) / ranks / self.inside
        between = size * (1 - here / ranks) / self.between
        return max(inside, between) + self.hop_inside + (self.hop_between if ranks > here else 0.0)

    def send(self, size: float, receivers: int, gpus: int) -> float:
        """Broadcast from one rank, in a ring; `gpus` are all of the cluster, that of the sender included. The sender's
        own link is what limits it."""
        nodes = ceil(gpus / self.node)
        slowest = self.between if nodes > 1 else self.inside
        away = min(receivers, nodes - 1)
        return size / slowest + (receivers - away) * self.hop_inside + away * self.hop_between
