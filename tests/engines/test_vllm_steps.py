"""How tokens leave vLLM's engine process: log-probabilities of all requests together, and each gets its own."""

import asyncio
import re
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import needs

pytest.importorskip("vllm", reason=needs.VLLM)

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists

from asyncrl.config.engine import VllmEngine
from asyncrl.engines.vllm.requests import VllmRequests, _Job, _sampled
from asyncrl.engines.vllm.scheduler import join
from asyncrl.errors import EngineError
from benchmarks import vllm_host
from tests.support.driving import ask


def batch_of(counts: list[int], *, drafted: bool) -> LogprobsLists:
    """What a model runner reports: a row for each token where some were drafted, else for each request."""
    rows = sum(counts) if drafted else len(counts)
    starts = np.cumsum([0, *counts]).tolist() if drafted else None
    values = np.arange(2 * rows, dtype=np.float32).reshape(rows, 2)
    return LogprobsLists(100 + values.astype(np.int32), -values, np.arange(rows), starts)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=9), st.booleans(), st.randoms(use_true_random=False))
def test_joined_rows_are_those_that_vllm_cuts_for_each_request(
    counts: list[int], drafted: bool, random: Random
) -> None:
    counts = counts if drafted else [min(count, 1) for count in counts]
    logprobs, index = batch_of(counts, drafted=drafted), {f"r{place}": place for place in range(len(counts))}
    cut = {name: logprobs.slice_request(place, counts[place]) for name, place in index.items()}
    names = list(index)
    random.shuffle(names)
    apart = [EngineCoreOutput(name, cut[name][0][:, 0].tolist(), cut[name]) for name in names]
    together = [EngineCoreOutput(output.request_id, output.new_token_ids) for output in apart]
    join(logprobs, index, together)
    assert sum(output.new_logprobs is not None for output in together) == (sum(counts) > 0)
    tokens, _ = _sampled(together)
    assert tokens == [token for output in apart for token in output.new_token_ids]
    assert _sampled(together) == _sampled(apart)


class Answers(VllmRequests):
    """The reading side alone, with requests that vLLM has begun."""

    def __init__(self, *names: str) -> None:
        super().__init__(VllmEngine(), "test", 7)
        for name in names:
            self._jobs[name] = self._running[name] = _Job(ask(name, [1]), name)


def row(tokens: list[int], values: list[float]) -> LogprobsLists:
    return LogprobsLists(np.array(tokens)[:, None], np.array(values, np.float32)[:, None], np.zeros(len(tokens)))


def test_a_step_is_shared_out_and_what_nobody_waits_for_is_skipped() -> None:
    async def scenario() -> None:
        side = Answers("a", "c")
        joined = row([5, 6, 7, 8], [-1.0, -2.0, -3.0, -4.0])
        outputs = [
            EngineCoreOutput("a", [5, 6], joined),
            EngineCoreOutput("left", [7]),
            EngineCoreOutput("c", [8], finish_reason=FinishReason.LENGTH),
        ]
        first, second = side._running["a"], side._running["c"]
        side._take_step(EngineCoreOutputs(outputs=outputs))
        assert (first.tokens, first.logprobs) == ([5, 6], [-1.0, -2.0])
        assert list(side._running) == list(side._jobs) == ["a"]
        delta = second.deltas.get_nowait()
        assert not isinstance(delta, EngineError)
        assert (delta.finish, delta.segment.tokens.tolist(), delta.segment.logprobs.tolist()) == ("length", [8], [-4.0])
        assert (side._counters.steps, side._generated) == (1, 3)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("logprobs", "said"),
    [
        (row([5], [float("nan")]), "not finite under version 7"),
        (row([9], [-1.0]), r"log-probabilities of \[9\], not of its tokens"),
        (None, r"log-probabilities of \[\], not of its tokens"),
    ],
)
def test_a_request_is_lost_before_it_has_wrong_log_probabilities(logprobs: LogprobsLists | None, said: str) -> None:
    async def scenario() -> None:
        side = Answers("a")
        job = side._running["a"]
        side._take_step(EngineCoreOutputs(outputs=[EngineCoreOutput("a", [5], logprobs)]))
        lost = job.deltas.get_nowait()
        assert isinstance(lost, EngineError)
        assert re.search(said, str(lost))
        assert not side._running
        assert not side._jobs
        assert job.tokens == []

    asyncio.run(scenario())


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_the_benchmark_tells_what_a_step_takes_of_each_process(capfd: pytest.CaptureFixture[str]) -> None:
    vllm_host.main(["--requests", "4", "--tokens", "8"])
    assert re.search(
        r"4 requests: .* tokens/s; .*engine process [\d.+ ]+ by threads, this one [\d.]+", capfd.readouterr().out
    )
