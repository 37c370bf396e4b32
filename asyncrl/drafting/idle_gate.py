"""One byte of shared memory that says whether the policy's trainer is at work.

The drafter is the job of least importance: it looks at the byte between two of its own small updates and waits while
it is set. A message would cost the trainer more than the training that it makes room for.
"""

import mmap
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


class BusyFlag:
    """Shared by processes of one host through a file."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, 1)
        self._byte = mmap.mmap(descriptor, 1)
        os.close(descriptor)

    @property
    def is_set(self) -> bool:
        return self._byte[0] == 1

    @contextmanager
    def set(self) -> Generator[None, None, None]:
        self._byte[0] = 1
        try:
            yield
        finally:
            self._byte[0] = 0
