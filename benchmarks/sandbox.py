"""Sandboxed programs a second: a fresh sandbox for each, and how long one takes.

    python -m benchmarks.sandbox [--workers 2] [--programs 400] [--tests 1]

First the sandbox alone, one process for each worker, then the code reward in the reward pool, as in a run. The bar is
50 programs a second on 2 cores. CPU time is that of all processes of a program; it hardly depends on who else is busy.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from asyncrl.config import Reward
from asyncrl.config.task import CodeTask, Limits
from asyncrl.sandbox.base import Input
from asyncrl.sandbox.sandbox import Sandbox
from asyncrl.tasks.registry import make_task
from asyncrl.user_code.pool import RewardPool
from asyncrl.user_code.protocol import RewardInput

PROGRAM = "import sys\nnumbers = [int(word) for word in sys.stdin.read().split()]\nprint(sum(numbers))\n"
TEST = {"stdin": "1 2 3 4\n", "stdout": "10\n"}


def costs(programs: int, tests: int) -> list[tuple[float, float]]:
    """Seconds of wall clock and CPU, in one worker, one program after the other."""
    sandbox = Sandbox()
    inputs = [Input(stdin=TEST["stdin"])] * tests
    taken: list[tuple[float, float]] = []
    for _ in range(programs):
        began, cpu_began = time.perf_counter(), sum(os.times()[:4])
        outputs = list(sandbox.run(PROGRAM, inputs, Limits()))
        taken.append((time.perf_counter() - began, sum(os.times()[:4]) - cpu_began))
        assert [output.data for output in outputs] == [TEST["stdout"].encode()] * tests
    return taken


def alone(workers: int, programs: int, tests: int) -> None:
    with ProcessPoolExecutor(workers) as pool:
        list(pool.map(costs, [1] * workers, [tests] * workers))  # imports are not counted
        began = time.perf_counter()
        shares = pool.map(costs, [programs // workers] * workers, [tests] * workers)
        taken = [cost for share in shares for cost in share]
        total_s = time.perf_counter() - began
    cuts = statistics.quantiles((wall_s for wall_s, _ in taken), n=100)
    cpu_s = statistics.mean(cpu_s for _, cpu_s in taken)
    print(
        f"sandbox: {len(taken) / total_s:.0f} executions/s, p50 {1000 * cuts[49]:.1f} ms, "
        f"p99 {1000 * cuts[98]:.1f} ms, CPU {1000 * cpu_s:.1f} ms"
    )


async def in_the_pool(workers: int, programs: int, tests: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "problems.jsonl"
        path.write_text(json.dumps({"prompt": "Print the sum.", "tests": [TEST] * tests}))
        prompt = make_task(CodeTask(path=str(path)), seed=0).prompt("train", 0)
    sample = RewardInput(prompt.text, f"```python\n{PROGRAM}```", prompt.answer)
    pool = RewardPool(Reward(function="asyncrl.rewards.code:reward", workers=workers, timeout_s=60))
    await pool.score([sample] * 2 * workers)
    began = time.perf_counter()
    results = await pool.score([sample] * programs)
    total_s = time.perf_counter() - began
    await pool.close()
    assert results == [1.0] * programs
    print(f"reward pool: {programs / total_s:.0f} executions/s")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--programs", type=int, default=400)
    parser.add_argument("--tests", type=int, default=1, help="inputs of each program")
    options = parser.parse_args(arguments)
    print(
        f"{options.workers} workers, {options.programs} programs with {options.tests} test(s) each, load",
        os.getloadavg(),
    )
    alone(options.workers, options.programs, options.tests)
    asyncio.run(in_the_pool(options.workers, options.programs, options.tests))


if __name__ == "__main__":
    main()
