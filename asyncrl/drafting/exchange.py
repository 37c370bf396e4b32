"""How a bandit in another process reports, and is told what to do: by two small files, wherever that process is put."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from asyncrl.drafting.bandit import Range
from asyncrl.drafting.settings import Eagle3Drafter, EagleDrafter, NgramDrafter
from asyncrl.types import SpeculationArm


class Report(msgspec.Struct, frozen=True):
    """What the process with the bandit says."""

    arms: tuple[SpeculationArm, ...] = ()
    depth: int | None = None
    """The one that it was told to use; None: the bandit chooses."""
    learned: Sequence[Range] = ()
    """All that the bandit knows; what our engine writes here before the start is what it begins with."""


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """What that process has to know, and the folder in which it and our engine write to each other."""

    drafter: NgramDrafter | EagleDrafter | Eagle3Drafter
    folder: str

    def report(self) -> Report:
        path = Path(self.folder, "report")
        return msgspec.json.decode(path.read_bytes(), type=Report) if path.exists() else Report()

    def order(self, depth: int | None) -> None:
        """Draft so many tokens in every step; None: the bandit chooses."""
        self.write("depth", depth)

    def ordered(self) -> int | None:
        path = Path(self.folder, "depth")
        return msgspec.json.decode(path.read_bytes(), type=int | None) if path.exists() else None

    def write(self, name: str, said: Report | int | None) -> None:
        """Whole or not at all, for whoever reads meanwhile."""
        draft = Path(self.folder, f"{name}.new")
        draft.write_bytes(msgspec.json.encode(said))
        draft.rename(draft.with_suffix(""))
