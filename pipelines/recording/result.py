"""A run that is over, or one that goes on elsewhere: its figures and its picture."""

from html import escape
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.system.run_directory import RunDirectory
from pipelines.recording.plot import Curve

SHOWN = {"reward": "reward", "held_out": "held-out"}


class Result:
    """The figures of a run directory. In a notebook it is shown as a picture."""

    # Imports are inside: a file with a function of the user's is imported by every worker, and most files with one
    # import this module, too.

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)

    @property
    def summary(self) -> dict[str, Any]:
        """The figures of summary.json."""
        return msgspec.json.decode(RunDirectory.open(self.directory).summary.read_bytes())

    def curves(self) -> dict[str, Curve]:
        """Every figure of the steps by its name, `held_out` and `held_out_greedy` among them."""
        from pipelines.recording.compare import read_one

        return read_one(self.directory, self.directory.name).curves

    def report(self, out: Path | None = None) -> Path:
        """Write the page that explains the run; returns its path."""
        from pipelines.recording.report import write_report

        return write_report(self.directory, out)

    def __repr__(self) -> str:
        from pipelines.recording.summary import sentence

        return f"{self.directory}: {sentence(self.summary)}"

    def _repr_html_(self) -> str:
        from pipelines.recording.notebook import picture

        curves = self.curves()
        shown = {name: curves[key] for key, name in SHOWN.items() if key in curves}
        return f"<div>{escape(repr(self))}</div>{picture(shown)}"
