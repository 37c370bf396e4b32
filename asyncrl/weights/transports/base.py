"""What a transport is: one way for the bytes of a publication to get from the trainer to the engines."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

from asyncrl.types import SendOrder, WeightManifest
from asyncrl.weights.flat import Flat
from asyncrl.weights.gather import Tensors


class Writer(Protocol):
    """The trainer's side."""

    def publish(self, version: int, order: SendOrder | None = None) -> WeightManifest:
        """Put the weights where the order's members can get them; without an order, where anybody can."""
        ...

    def close(self) -> None: ...


class WriterOptions(NamedTuple):
    """Each transport takes what it needs of them."""

    prefix: str
    """Begins the names of what is made in the machine's memory."""
    folder: Path | None = None
    """Where files go."""
    deadline_s: float = 120.0
    delta: bool = False
    """Send only what has changed, where that is less."""


class Transport(ABC):
    """Both sides of one way. There is one object of each in a process."""

    scheme: ClassVar[str]
    """Begins the location of every manifest of this transport."""
    verifies: ClassVar[bool] = False
    """Whether `read` has compared every bucket with its digest, so that nobody has to do it again."""
    joinable: ClassVar[bool] = True
    """Whether an engine that was not there at the publication can read it all the same."""

    @abstractmethod
    def writer(self, tensors: Tensors, options: WriterOptions) -> Writer:
        """The trainer's side; `tensors` is called for each publication."""

    @abstractmethod
    def read(self, manifest: WeightManifest) -> Flat:
        """The bytes of a publication: mapped where they are, or brought here."""

    def addressed(self, manifest: WeightManifest, name: str) -> str:
        """The manifest's location, for the receiver of that name alone."""
        return manifest.location
