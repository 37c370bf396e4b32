"""The engine protocol. One conformance suite (tests/engines) holds for every implementation."""

from collections.abc import AsyncIterator
from typing import Literal, Protocol

from asyncrl.drafting.bandit import Range
from asyncrl.types import Delta, EngineStats, Request, WeightAck, WeightManifest

OnUpdate = Literal["keep", "recompute"]
"""What happens to running answers at a weight update: go on with old keys and values, or prefill them again."""


class Engine(Protocol):
    """Generates answers token by token under one policy version at a time.

    Every method is called from one event loop. An update takes effect between two decoding steps, so each token has
    exactly one version.
    """

    @property
    def refusal(self) -> str:
        """Why nothing can be served; empty while the engine serves."""
        ...

    async def start(self) -> None:
        """Load the model and begin to serve."""
        ...

    def submit(self, request: Request) -> AsyncIterator[Delta]:
        """Generate; yields a delta when the version changes under way and one, with `finish`, at the end. An engine
        that was built to return routes puts them into the segments (`Trajectory.route_bytes`)."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator yields what was sampled so far with finish `abort`."""
        ...

    async def pause(self) -> None:
        """Take no further decoding step after this returns; running answers stay where they are."""
        ...

    async def resume(self) -> None:
        """Go on after `pause`."""
        ...

    async def load_weights(self, manifest: WeightManifest, on_update: OnUpdate) -> WeightAck:
        """Switch to the published version between two steps; the digest is taken from the weights as loaded."""
        ...

    async def load_drafter(self, manifest: WeightManifest) -> WeightAck:
        """New weights for the drafting head, between two steps; the policy and its version stay."""
        ...

    def stats(self) -> EngineStats: ...

    def learned(self) -> list[Range]:
        """What was measured about drafting, for an engine after this one to begin with; empty where nothing was."""
        ...

    async def close(self) -> None:
        """Abort what runs, release memory and end; idempotent."""
        ...
