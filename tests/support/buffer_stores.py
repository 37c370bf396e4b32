"""Small trajectories and buffers for tests."""

from pathlib import Path
from typing import Any

from asyncrl.buffer.store import TrajectoryBuffer
from asyncrl.config import Buffer
from asyncrl.data.arrow import encode
from asyncrl.types import Segment, Slot, Trajectory


def trajectory(group: int, sample: int, version: int = 0, tokens: int = 5) -> Trajectory:
    return Trajectory(
        slot=Slot(group, sample),
        prompt=f"chains/train/{group}",
        segments=(
            Segment.given([group % 97, sample]),
            Segment.sampled(range(tokens), [-0.25] * tokens, version),
        ),
        reward=float(sample),
        finish="stop",
        started=1.0,
        finished=2.0,
        engine="rollout-0",
    )


def payload(group: int, sample: int, version: int = 0, tokens: int = 5) -> bytes:
    return encode(trajectory(group, sample, version, tokens))


def open_buffer(directory: Path, **changes: Any) -> TrajectoryBuffer:
    """Groups of 2, 2 groups a step, staleness 1, unless told otherwise."""
    terms: dict[str, Any] = {
        "group_size": 2,
        "groups_per_step": 2,
        "max_staleness": 1,
        "group_timeout_s": 10.0,
        "sample_bytes": 1024,
    }
    settings = Buffer(**{name: changes.pop(name) for name in list(changes) if name in Buffer.__struct_fields__})
    return TrajectoryBuffer(directory, "test-run", settings, **(terms | changes))
