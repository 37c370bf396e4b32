"""`asyncrl chaos`: a real run as a child process, faults from a seed, and the checker over what is left.

    start -> reach the fault's point -> inject -> (the run recovers, or has ended: resume) -> ... -> check

A run that ends by itself with an error after a fault is resumed; one that does so again and again, or that does
nothing for longer than its own deadlines, has failed. The verdict names the seed, and the command that repeats it.
"""

import os
import random
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from asyncrl.buffer.journal import Committed
from asyncrl.chaos import damage
from asyncrl.chaos.plan import DRIVER, REWARD_KINDS, Fault, plan, roles
from asyncrl.chaos.rewards import write_wrapper
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.observe.audit.evidence import DamageError, Tally, read_journal, stored_slots
from asyncrl.system.run_directory import RunDirectory
from asyncrl.types import Slot
from pipelines.cli.check import check, conservation
from pipelines.compose import compose

MARK = "ASYNCRL_CHAOS"
"""Environment variable of the driver and so of every process that comes from it; its value is the run directory."""
CLASSES = {
    "buffer": "BufferActor",
    "reward": "RewardActor",
    "gateway": "GatewayActor",
    "trainer": "TrainerActor",
    "drafter": "DrafterActor",
}
RAYS_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""They hold no state of ours, and end by themselves a minute after the head node that died with the driver."""
COMMAND = "from pipelines.cli import main; raise SystemExit(main())"
SIGNALS = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP}
PUSH = "CoreWorkerService.grpc_client.PushTask"
LOST_REPLIES = {"num_failures": 2, "req_failure_prob": 0, "resp_failure_prob": 2, "in_flight_failure_prob": 0}
"""Of each process: at most two replies, 2 % of the first ones. Ray draws them by itself, so the seed does not."""
DISK_ROOM = 4096
POLL_S = 0.2
END_S = 60.0
"""For the processes of a run to end after their driver."""
SPARE_ATTEMPTS = 3


class ChaosError(AsyncRLError, RuntimeError):
    """The run did not survive; the message says how."""


def chaos(
    overrides: Sequence[str], *, seed: int, faults: Sequence[str], rounds: int, at_least: float | None = None
) -> int:
    """Exit code 0 if the run came to its end and its directory is sound."""
    named = overrides if any(word.startswith("name=") for word in overrides) else [*overrides, f"name=chaos-{seed}"]
    run = compose(named)
    directory = (Path(run.root) / run.name).resolve()
    if not Path("/proc").is_dir() or directory.exists():
        raise ConfigError(f"asyncrl chaos needs Linux, and {directory} must not exist yet; give another name=...")
    planned = plan(seed, faults, rounds, roles(run))
    bad = [kind for kind in faults if kind in REWARD_KINDS and run.reward.function]
    directory.parent.mkdir(parents=True, exist_ok=True)
    if bad:
        module = directory.with_name(f"{run.name}.reward.py")
        wrapper = write_wrapper(module, run.reward.function, seed, bad, run.steps * run.samples_per_step)
        named = [*named, f"reward.function={wrapper}"]
    with tempfile.TemporaryDirectory(prefix="chaos-", dir="/tmp") as rays:
        attacked = ChaosRun(directory, run.name, run.steps, named, rays, run.flow.stall_timeout_s + END_S)
        try:
            attacked.run(planned)
            verdict = attacked.verdict(at_least)
        except AsyncRLError as error:
            again = ["asyncrl", "chaos", *overrides, "--seed", str(seed), "--faults", ",".join(faults)]
            print(f"chaos seed {seed}: FAILED: {error}\nrepeat: {shlex.join([*again, '--rounds', str(rounds)])}")
            return 1
        finally:
            attacked.stop()
    print(f"chaos seed {seed}: sound: {verdict}")
    return 0


class ChaosRun:
    """A run under attack: starts it, injects the planned faults, resumes it, and judges what is left."""

    def __init__(
        self, directory: Path, run_id: str, steps: int, overrides: Sequence[str], rays: str, patience_s: float
    ) -> None:
        self._directory, self._run_id, self._steps = directory, run_id, steps
        self._overrides, self._patience_s = overrides, patience_s
        self._processes = Processes(directory)
        self._environment = os.environ | self._processes.environment | {"RAY_TMPDIR": rays}
        self._log = directory.with_name(f"{run_id}.log")
        self._trajectories = RunDirectory(directory).trajectories
        self._driver: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._done: list[str] = []
        self._acknowledged: set[Slot] = set()
        self._begun = time.monotonic()

    def run(self, planned: Sequence[Fault]) -> None:
        most = len(planned) + SPARE_ATTEMPTS
        for fault in planned:
            while self._reach(fault.at, most):
                time.sleep(fault.delay_s)
                if self._inject(fault):
                    self._done.append(f"{fault.kind} {fault.role}")
                    break
        self._reach(2.0, most)

    def verdict(self, at_least: float | None) -> str:
        found = check(self._directory)
        if not found.sound:
            raise ChaosError(f"{found.violations[0]} (asyncrl check {self._directory})")
        if lost := self._acknowledged - stored_slots(self._trajectories, self._run_id):
            raise ChaosError(f"{len(lost)} stored trajectories are gone, such as {min(lost)}")
        score = msgspec.json.decode(RunDirectory(self._directory).summary.read_bytes())["eval_last"]
        if at_least is not None and (score is None or score < at_least):
            raise ChaosError(f"the held-out score is {score}, wanted were {at_least}")
        return (
            f"{found.steps} steps in {time.monotonic() - self._begun:.0f} s, {len(self._done)} faults "
            f"({', '.join(self._done) or 'none'}), started {self._starts} times; {conservation(found.ledger)}"
            + (f"; held-out {score:.3f}" if score is not None else "")
        )

    def stop(self) -> None:
        """Leave no process behind."""
        if self._driver is not None and self._driver.poll() is None:
            self._driver.kill()
            self._driver.wait()
        self._processes.end(END_S)

    # -- watching ------------------------------------------------------------------------------------------------

    def _reach(self, share: float, most: int) -> bool:
        """Wait until that share of the steps is done, resuming whatever has ended; False: the run is over."""
        seen, since = -1, time.monotonic()
        while True:
            code = self._driver.poll() if self._driver is not None else 1
            if code == 0:
                return False
            if code is not None:
                if self._starts >= most:
                    raise ChaosError(f"it ended {self._starts} times, the last time with: {self._last_words()}")
                self._start()
                since = time.monotonic()
            if self._share() >= share:
                return True
            if (size := self._size()) != seen:
                seen, since = size, time.monotonic()
            if time.monotonic() - since > self._patience_s:
                raise ChaosError(f"nothing was written for {self._patience_s:.0f} s, which is past its own deadline")
            time.sleep(POLL_S)

    def _start(self, **environment: str) -> None:
        self._processes.end(END_S)
        started = (self._directory / "config.yaml").exists()
        words = ["resume", str(self._directory)] if started else ["run", *self._overrides]
        with self._log.open("ab") as log:
            self._driver = subprocess.Popen(
                [sys.executable, "-P", "-c", COMMAND, *words],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=self._environment | environment,
                start_new_session=True,
            )
        self._starts += 1

    def _share(self) -> float:
        if not self._trajectories.is_dir():
            return -1.0
        with suppress(DamageError, FileNotFoundError):  # it is being written
            done = read_journal(self._trajectories, self._run_id, Tally())
            return sum(isinstance(record, Committed) for _, record in done) / self._steps
        return -1.0

    def _size(self) -> int:
        """Of what grows while a run makes progress."""
        found = 0
        for path in (self._log, self._directory / "events.jsonl", *self._trajectories.glob("*")):
            with suppress(FileNotFoundError):
                found += path.stat().st_size
        return found

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "nothing"

    # -- faults --------------------------------------------------------------------------------------------------

    def _inject(self, fault: Fault) -> bool:
        """False: the run ended before the fault was injected."""
        rng = random.Random(fault.seed)
        match fault.kind:
            case "kill" | "segv" | "stop":
                return self._signal(fault)
            case "disk":
                return self._fill_disk(fault.role)
            case "torn":
                self._kill_driver()
                damage.tear(self._trajectories, rng)
            case "flip":
                self._kill_driver()
                self._flip(rng)
            case _:
                self._kill_driver()
                self._start(RAY_testing_rpc_failure=msgspec.json.encode({PUSH: LOST_REPLIES}).decode())
        return True

    def _signal(self, fault: Fault) -> bool:
        if (pid := self._find(fault.role)) is None:
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, SIGNALS[fault.kind])
            if fault.kind == "stop":
                time.sleep(fault.hold_s)
                os.kill(pid, signal.SIGCONT)
        return True

    def _fill_disk(self, role: str) -> bool:
        """Files of one process cannot grow any more; a restarted process is not limited."""
        sizes = [path.stat().st_size for path in self._trajectories.glob("trajectories-*.open")]
        room = (max(sizes, default=0) if role == "buffer" else 0) + DISK_ROOM
        if (pid := self._find(role)) is None:
            return False
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        return True

    def _find(self, role: str) -> int | None:
        """The process of a role, waited for while it restarts; None once the run has ended."""
        assert self._driver is not None
        end = time.monotonic() + END_S
        while self._driver.poll() is None and time.monotonic() < end:
            if (pid := self._driver.pid if role == DRIVER else self._processes.of(role)) is not None:
                return pid
            time.sleep(POLL_S)
        return None

    def _kill_driver(self) -> None:
        assert self._driver is not None
        self._driver.kill()
        self._driver.wait()
        self._processes.end(END_S)
        self._acknowledged |= stored_slots(self._trajectories, self._run_id)

    def _flip(self, rng: random.Random) -> None:
        flipped = damage.flip(self._trajectories, rng)
        if flipped is None:
            return
        self._start()
        assert self._driver is not None
        with suppress(subprocess.TimeoutExpired):
            self._driver.wait(self._patience_s)
        if self._driver.poll() in (None, 0) or "is damaged at offset" not in self._last_words():
            raise ChaosError(
                f"byte {flipped.offset} of {flipped.path} was flipped, but resuming said: {self._last_words()}"
            )
        self._starts -= 1  # it was meant to fail
        flipped.toggle()


class Processes:
    """The processes of one run, seen from outside: by its directory, and by a mark in their environment. Linux only."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.environment = {MARK: str(directory)}

    def of(self, role: str) -> int | None:
        """The living process of a role: as the driver wrote it down, or, if it was restarted since, by its title."""
        path = RunDirectory(self._directory).actors
        known: dict[str, int] = msgspec.json.decode(path.read_bytes()) if path.exists() else {}
        titles = dict(self._living())
        if known.get(role) in titles:
            return known[role]
        title = f"ray::{CLASSES.get(role.split('-')[0], 'RolloutActor')}"
        return next((pid for pid, text in titles.items() if text.startswith(title)), None)

    def end(self, timeout_s: float) -> None:
        """Wait until none is left; whoever outlives its driver by `timeout_s` is killed."""
        end = time.monotonic() + timeout_s
        while left := [pid for pid, title in self._living() if not title.startswith(RAYS_AGENTS)]:
            if time.monotonic() > end:
                for pid in left:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def _living(self) -> Iterator[tuple[int, str]]:
        """Process ids and titles. Read from /proc: Ray writes titles over the start of a process's environment, and
        psutil stops parsing it there."""
        mark = f"{MARK}={self._directory}\0".encode()
        for process in Path("/proc").iterdir():
            if not process.name.isdigit() or int(process.name) == os.getpid():
                continue
            with suppress(OSError):  # it ended while we looked, or belongs to somebody else
                if mark in (process / "environ").read_bytes():
                    yield int(process.name), (process / "cmdline").read_bytes().decode(errors="replace")
