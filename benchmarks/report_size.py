"""The report of a run with 100,000 trajectories: seconds to build it, its bytes, seconds until it is open in Chromium.

    make bench-report_size

The run is synthetic, written through the real buffer and recorder, with a long tail and a share of stale drops.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.synthetic_runs import Scenario, write_run

BUILD_S, OPEN_S, BYTES = 30.0, 3.0, 10 << 20


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=120, help="median of an answer")
    parser.add_argument("--keep", type=Path, help="leave the run and its report here")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        held = _measure(options.keep or Path(scratch), options.trajectories, options.tokens)
    return 0 if held else 1


def _measure(root: Path, trajectories: int, tokens: int) -> bool:
    groups, size = 32, 8
    scenario = Scenario(
        steps=-(-trajectories // (groups * size)), groups=groups, group_size=size, engines=4, workers=8, train=0.02,
        token=0.01, median_tokens=tokens, spread=0.6, long_share=0.01, long_times=8.0, lagging=0.05,
    )  # fmt: skip
    begun = time.perf_counter()
    run = write_run(root, scenario)
    print(f"{scenario.steps * groups * size:,} trained trajectories written in {time.perf_counter() - begun:.0f} s")
    report = root / "report.html"
    begun = time.perf_counter()
    command = [Path(sys.executable).with_name("asyncrl"), "report", run, "--out", report]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    built = time.perf_counter() - begun
    held = _bar("built", built, BUILD_S, "s") & _bar("size", report.stat().st_size / 2**20, BYTES / 2**20, "MiB")
    opened = _open(report)
    if opened is None:
        print("opened: not measured, there is no Chromium")
        return held
    return held & _bar("opened", opened, OPEN_S, "s")


def _open(report: Path) -> float | None:
    """Until everything is drawn, from the moment when the browser is asked for it."""
    chromium = shutil.which("chromium")
    if chromium is None:
        return None
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        begun = time.perf_counter()
        page.goto(report.resolve().as_uri())
        page.wait_for_selector("html[data-ready]")
        page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        opened = time.perf_counter() - begun
        browser.close()
    return opened


def _bar(what: str, value: float, limit: float, unit: str) -> bool:
    held = value <= limit
    print(f"{what}: {value:.2f} {unit}, at most {limit:g}: {'held' if held else 'NOT held'}")
    return held


if __name__ == "__main__":
    sys.exit(main())
