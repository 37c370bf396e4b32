"""For all tests: one thread for torch, a small model, files that take long first, and a last line about skipped tests.

An example of hypothesis may take as long as the machine needs for it, and every run tries the same ones, so that a
change is judged by itself. `--hypothesis-profile=searching` looks for new ones.
"""

import gc
import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # there are as many test processes as cores; and runs repeat to the bit
# A shell's background jobs ignore it, their children with them: then no test could interrupt what it has started.
signal.signal(signal.SIGINT, signal.default_int_handler)
_trackio = TemporaryDirectory(prefix="trackio-")
os.environ["TRACKIO_DIR"] = _trackio.name  # it looks once, when it is imported, which TRL does as well

settings.register_profile("patient", deadline=None, derandomize=True)
settings.register_profile("searching", deadline=None)
settings.load_profile("patient")

FIRST = (
    "tests/chaos/test_harness.py",
    "tests/engines/test_conformance.py",
    "tests/docs/test_commands.py",
    "tests/system/test_own_process.py",
    "tests/engines/test_vllm.py",
    "tests/chaos",
    "tests/pipelines",
    "tests/buffer/test_crash.py",
    "tests/engines",
    "tests/precision",
    "tests/supervision",
    "tests/security",
    "tests/sandbox",
)
"""What takes long, the longest first: begun last, it would be what the other processes wait for."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Too short a start to be any good at the task; it ends most answers, which is what bookkeeping needs."""
    from asyncrl.config import WarmStart
    from asyncrl.config.task import ChainsTask
    from asyncrl.training.warm_start import make_model

    return make_model(WarmStart(steps=40), ChainsTask(), 0, tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _same_products_for_every_test() -> Generator[None]:
    """On a CPU without bf16 the first product in it makes torch give oneDNN up for the whole process, and products in
    fp32 have other last digits from then on: a run that a test resumes here would differ from its first steps, which
    were made in a process of their own."""
    yield
    if (torch := sys.modules.get("torch")) is not None:
        torch.backends.mkldnn.set_flags(True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {
        item.nodeid: next((at for at, path in enumerate(FIRST) if item.nodeid.startswith(path)), len(FIRST))
        for item in items
    }
    items.sort(key=lambda item: places[item.nodeid])


def pytest_collection_finish() -> None:
    """A million objects of modules and tests stay to the end. If every full garbage collection looked at them, each
    would take half a second, and tests that allocate much would spend most of their time in it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None]:
    """After pytest's own last line. The processes of xdist have no reporter, and the first one knows all they did."""
    yield
    from tests.support.needs import total

    reporter: pytest.TerminalReporter | None = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", ()) if reporter else ()
    if reporter and (line := total(report.longrepr[-1] for report in skipped)):
        reporter.write_line(line)
