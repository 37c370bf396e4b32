"""`asyncrl report RUN`: one HTML file that shows a run, also while it goes on."""

from contextlib import closing
from pathlib import Path

from asyncrl.observe.report.document import document, render
from asyncrl.observe.report.recorded import read
from asyncrl.system.run_directory import replace

NAME = "report.html"


def write_report(run: Path, out: Path | None = None) -> Path:
    """Write the report to `out`, or into the run's directory, and return where it is."""
    target = out or run / NAME
    recorded = read(run)
    with closing(recorded.connection):
        page = render(document(recorded))
    target.parent.mkdir(parents=True, exist_ok=True)
    replace(target, page.encode())
    return target
