"""A run on a real Ray whose processes are stopped with SIGSTOP, explained or waited for, and let go on."""

import asyncio
import os
import re
import signal
import time
from collections.abc import Generator
from pathlib import Path

import msgspec
import pytest

from actors.runtime.spawn import Spawner, cluster
from asyncrl.observe.diagnosis.snapshot import Explanation
from pipelines.recording.recorder import Recorder
from tests.support.watched_run import Telling, play, small, until

LIMIT_S = 5.0
LATE_S = 20.0
"""Past its limit a stall is explained within this, on a machine that is busy with other things."""
MAX_BYTES = 8 << 20


@pytest.fixture(scope="module")
def ray() -> Generator[Spawner, None, None]:
    with cluster("local", cpus=2) as spawner:
        yield spawner


async def _explained(watchdog: Telling, recorder: Recorder, name: str) -> Explanation:
    """Stop an actor until the watchdog has said something."""
    pid, began = await watchdog.pid(name), time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    try:
        found = await watchdog.next()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert time.monotonic() - began < LIMIT_S + LATE_S
    print(found.sentence)
    steps = len(recorder.rows)
    await until(lambda: len(recorder.rows) > steps)
    return found


@pytest.mark.timeout(300)
def test_every_role_is_named_when_it_is_stopped(tmp_path: Path, model: Path, ray: Spawner) -> None:
    async def scenario(watchdog: Telling, recorder: Recorder) -> None:
        await until(lambda: len(recorder.rows) > 1)
        for name in ("rollout-0", "trainer", "buffer", "reward", "drafter"):
            found = await _explained(watchdog, recorder, name)
            assert "is stopped (SIGSTOP) and has not answered for" in found.sentence
            assert name in found.sentence
            assert found.suspects[0] == name
            if name == "trainer":
                waits = r"complete groups wait in the buffer and no new one is admitted \((staleness|freshness): \d"
                assert re.search(waits, found.sentence)
            written = msgspec.json.decode((tmp_path / "run" / "stall.json").read_bytes())
            assert written["sentence"] == found.sentence
            assert written["snapshot"]["actors"][name]["health"] == "stopped"
            assert "Worker.main_loop" in written["stacks"][name] or "(py-spy" in written["stacks"][name]

    limits = (f"flow.stall_timeout_s={LIMIT_S}", "checkpoint.every=1", "checkpoint.keep=1")
    play(small(tmp_path, model, *limits, "drafter=eagle"), model, ray, scenario)


def _memory(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("pause_s", [5, 60])
def test_a_trainer_that_pauses_costs_nothing(pause_s: int, tmp_path: Path, model: Path, ray: Spawner) -> None:
    """Shorter than the limit: nobody drops anything, nobody's memory grows past its budget, and the run goes on."""

    async def scenario(watchdog: Telling, recorder: Recorder) -> None:
        await until(lambda: len(recorder.rows) > 3)
        pids = {name: await watchdog.pid(name) for name in ("buffer", "reward", "rollout-0", "trainer")}
        budgets = {name: _memory(pid) + (MAX_BYTES if name == "buffer" else 0) for name, pid in pids.items()}
        os.kill(pids["trainer"], signal.SIGSTOP)
        peaks = dict.fromkeys(pids, 0)
        try:
            for _ in range(pause_s * 2):
                await asyncio.sleep(0.5)
                peaks = {name: max(peak, _memory(pids[name])) for name, peak in peaks.items()}
        finally:
            os.kill(pids["trainer"], signal.SIGCONT)
        print({name: f"{peaks[name] / budgets[name]:.3f} of {budgets[name] >> 20} MiB" for name in pids})
        for name, peak in peaks.items():
            assert peak <= 1.1 * budgets[name], name
        steps = len(recorder.rows)
        await until(lambda: len(recorder.rows) > steps + 2)
        assert recorder.rows[-1]["dropped"] == 0
        assert not watchdog.found

    limits = (f"flow.stall_timeout_s={pause_s + 25}", f"buffer.max_bytes={MAX_BYTES}")
    play(small(tmp_path, model, *limits), model, ray, scenario)
