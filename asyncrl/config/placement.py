"""What each role takes from the cluster."""

from typing import Literal

import msgspec

from asyncrl.config.base import AboveZero, NonNegative, Settings

Auto = Literal["auto"]


class Role(Settings, frozen=True):
    """What one process of a role takes from the machine that it is placed on."""

    cpus: NonNegative | Auto = "auto"
    """`auto` is 1 for those who compute and 0 for those who only hand things on."""
    gpus: NonNegative | Auto = "auto"
    """`auto`: on a cluster with several GPUs each rank of the trainer (but see `share_gpu`), each teacher and each
    engine has its own, an engine as many as `engine.tensor_parallel`; on one machine they share the card."""
    resources: dict[str, AboveZero] = msgspec.field(default_factory=dict[str, float])
    """Custom resources of Ray, by name: `placement.rollout.resources.rollout_slot=1`."""


class Placement(Settings, frozen=True):
    """What each role takes. How many there are: `rollout.replicas`, `trainer.ranks`, and one of the others."""

    rollout: Role = Role()
    trainer: Role = Role()
    buffer: Role = Role()
    reward: Role = Role()
    gateway: Role = Role()
    """Of a run of an agent."""
    drafter: Role = Role()
    teacher: Role = Role()
    """Of each of `teachers`."""
    share_gpu: bool = False
    """Several ranks of the trainer may lie on one GPU, for which NCCL 2.30 is needed. On a cluster each asks for such a
    part of a GPU that all find room beside engines and teachers."""
    wait_s: NonNegative = 0.0
    """For a cluster to bring what it lacks at the start. 0 refuses what it cannot be known to bring: the limits of an
    autoscaler are known from the file that `ray up` leaves on the head node."""
