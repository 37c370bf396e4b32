"""What orders host and device: one stream for all work of an engine, and marks on it that the host waits for.

Only new weights come in beside it: a step that has passed its middle does not read the first layers again.

On a CPU, where Triton's interpreter runs the kernels, everything is done as soon as it is asked for.
"""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor


class Timeline:
    def __init__(self, device: torch.device, *, urgent: bool = True) -> None:
        """If `urgent`, before others: blocks of a step begin as soon as there is room, ahead of a digest's."""
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=-int(urgent)) if device.type == "cuda" else None
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None
        # External, because graphs are to record it whenever they run.
        self._middle = torch.cuda.Event(external=True) if device.type == "cuda" else None

    @contextmanager
    def work(self) -> Generator[None]:
        """Without gradients, on the stream."""
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            yield

    def pass_middle(self) -> None:
        """Called in the middle of each step."""
        if self._middle is not None:
            self._middle.record()

    @contextmanager
    def beside(self) -> Generator[None]:
        """Without gradients, and not behind the running step: for what earlier ones have left."""
        with torch.inference_mode(), torch.cuda.stream(self._beside):
            yield

    @contextmanager
    def behind_middle(self) -> Generator[None]:
        """Beside the second half of the step that was launched last. What is launched next comes behind both."""
        if self.stream is None or self._beside is None or self._middle is None:
            yield
            return
        self._beside.wait_event(self._middle)
        with torch.cuda.stream(self._beside):
            yield
        self.stream.wait_stream(self._beside)

    def pinned(self, *shape: int) -> Tensor:
        """Host memory that the device copies to and from without stopping the host."""
        return torch.zeros(shape, dtype=torch.int32, pin_memory=self.stream is not None)

    def bring(self, tensor: Tensor) -> Tensor:
        """A copy on the device, for work that is launched from now on. The host waits for it, but not the stream."""
        found = tensor.to(self.device)
        if self.stream is not None and self._beside is not None:
            for stream in (self.stream, self._beside):
                found.record_stream(stream)  # its memory is nobody else's before that work is done
        return found

    def mark(self) -> "Mark":
        return Mark(self.stream)

    def fetch(self, held: Tensor, places: Tensor) -> tuple[Tensor, "Mark"]:
        """Rows of what earlier steps have left, for the host: they are there once the mark is passed. The host may go
        on meanwhile, and so may the running step."""
        on_gpu = self.stream is not None
        with self.beside():
            staged = places.pin_memory() if on_gpu else places
            found = held.index_select(0, staged.to(self.device, non_blocking=True))
            on_host = torch.empty(found.shape, dtype=found.dtype, pin_memory=on_gpu)
            on_host.copy_(found, non_blocking=True)
            return on_host, Mark(self._beside)

    def wait(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()


class Mark:
    """A point of the stream."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._event = stream.record_event() if stream is not None else None

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    @property
    def passed(self) -> bool:
        return self._event is None or self._event.query()
