"""The fake engine: lengths as asked for, and no torch."""

import asyncio
import subprocess
import sys

import numpy as np

from asyncrl.config.engine import FakeEngine as Settings
from asyncrl.engines.fake import FakeEngine
from tests.support.driving import ask, collect_all, serving


def test_lengths_are_log_normal_and_stops_are_kept() -> None:
    requests = [ask(str(i), seed=i, max_tokens=60, stop=(7,)) for i in range(600)]

    async def run() -> list[tuple[str, list[int]]]:
        async with serving(FakeEngine(Settings(median_tokens=20, sigma=0.7), name="fake")) as engine:
            return [(answer.finish, answer.tokens.tolist()) for answer in await collect_all(engine, requests)]

    answers = asyncio.run(run())
    lengths = np.array([len(tokens) for _, tokens in answers])
    assert 18 <= np.median(lengths) <= 22
    low, high = np.quantile(np.log(lengths), (0.25, 0.75))
    assert 0.6 < (high - low) / 1.349 < 0.8, "the spread between the quartiles, which truncation does not touch"
    for finish, tokens in answers:
        assert (tokens[-1] == 7) == (finish == "stop")
        assert 7 not in tokens[:-1]
        assert (finish == "length") <= (len(tokens) == 60)
    assert 0.02 < np.mean([finish == "length" for finish, _ in answers]) < 0.15


def test_it_needs_no_torch() -> None:
    code = "import sys, asyncrl.engines.fake; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
