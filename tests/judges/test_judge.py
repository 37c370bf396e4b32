"""A judge and its server, which fails in every way that servers do: each completion has a verdict or a reason."""

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from asyncrl.config.judge import Item, Judge
from asyncrl.drop_reasons import DropReason
from asyncrl.errors import CheckpointError, ConfigError, StorageError
from asyncrl.judges.client import LARGEST, retry_after
from asyncrl.judges.judge import ModelJudge
from asyncrl.judges.store import VerdictStore
from asyncrl.judges.trial import try_judge
from asyncrl.types import Prompt
from asyncrl.user_code.failures import ENOUGH
from asyncrl.user_code.protocol import RewardFailure, RewardInput, RewardResult
from asyncrl.user_code.score import Score
from tests.support.judge_server import GOOD, Faults, JudgeServer, judge_server

T = TypeVar("T")
KEY = "sk-a-key-that-nobody-may-see"
JUDGED = Score(1.9, {"function": 1.0, "judge_correct": 1.0, "judge_clear": 4.0})
"""A reward of 1 with what the server says by default: a mean of 1 and 4/5."""


def judge(server: JudgeServer, **changed: Any) -> Judge:
    rubric: dict[str, Item | str] = {"correct": "Is it right?", "clear": Item(ask="Is it clear?", points=5)}
    settings = Judge(url=server.url, model="m", rubric=rubric, backoff_s=0.01, timeout_s=5.0)
    return msgspec.structs.replace(settings, **changed)


def inputs(number: int) -> list[RewardInput]:
    return [RewardInput("p", f"completion {i}", "a") for i in range(number)]


def using(settings: Judge, work: Callable[[ModelJudge], Awaitable[T]], path: Path | None = None) -> T:
    async def run() -> T:
        opened = ModelJudge(settings, path)
        try:
            return await work(opened)
        finally:
            await opened.close()

    return asyncio.run(run())


def scores(settings: Judge, given: Sequence[RewardInput], path: Path | None = None) -> list[RewardResult]:
    return using(settings, lambda opened: opened.score(given, [1.0] * len(given)), path)


def failed(result: RewardResult) -> tuple[str, str]:
    assert isinstance(result, RewardFailure)
    return result.reason, result.message


def test_a_server_with_faults_of_every_kind_costs_no_verdict() -> None:
    faults = Faults(error=0.1, silence=0.1, limited=0.1, malformed=0.1)

    async def work(opened: ModelJudge) -> None:
        results = await opened.score(inputs(100), [1.0] * 100)
        assert results == [JUDGED] * 100
        stats, calls = opened.stats, server.calls
        assert stats.verdicts == len(set(server.asked)) == 100
        assert stats.rate_limited == calls["limited"] > 0
        # A call may be answered just when it is given up.
        assert stats.retries == stats.calls - stats.rate_limited - 100 >= calls["error"] + calls["malformed"] > 0
        assert stats.prompt_tokens >= 70 * 100
        assert stats.failures == 0

    with judge_server(faults=faults) as server:
        using(judge(server, timeout_s=0.5, deadline_s=100.0, retries=20), work)


def test_no_more_calls_at_a_time_than_is_allowed() -> None:
    with judge_server(seconds=0.02) as server:
        assert scores(judge(server, concurrency=3), inputs(20)) == [JUDGED] * 20
    assert server.most == 3


def test_the_same_completion_is_asked_about_once() -> None:
    async def work(opened: ModelJudge) -> None:
        assert await opened.score([given] * 8, [1.0] * 8) == [JUDGED] * 8
        assert await opened.score([given], [1.0]) == [JUDGED]
        assert opened.stats.cache_hits == 8

    (given,) = inputs(1)
    with judge_server(seconds=0.02) as server:
        using(judge(server), work)
    assert server.calls.total() == 1


def test_verdicts_and_costs_are_kept_for_those_who_come_after(tmp_path: Path) -> None:
    path = tmp_path / "judge.sqlite"
    with judge_server() as server:
        first = scores(judge(server), inputs(20), path)
    assert path.stat().st_mode & 0o777 == 0o600
    with judge_server() as elsewhere:  # a server that has moved is the same judge
        again = using(judge(elsewhere), lambda opened: opened.score(inputs(21), [1.0] * 21), path)
        assert elsewhere.calls.total() == 1
        asked = scores(judge(elsewhere, model="another"), inputs(20), path)
        assert elsewhere.calls.total() == 21
    assert first == again[:20] == asked
    replies = sqlite3.connect(path).execute("SELECT points, reply FROM verdicts").fetchall()
    assert replies == [('{"correct":1.0,"clear":4.0}', GOOD)] * 41
    assert VerdictStore(path, 1 << 20).stats.calls == 41


def test_the_oldest_verdicts_go_first(tmp_path: Path) -> None:
    store = VerdictStore(tmp_path / "judge.sqlite", 1000)
    for number in range(50):
        store.keep(b"%d" % number, {"right": 1.0}, "x" * 50)
    kept = [number for number in range(50) if store.find(b"%d" % number)]
    assert kept == list(range(50 - len(kept), 50))
    assert 1000 / 2 < len(kept) * 163 <= 1000
    store.close()
    assert not VerdictStore(None, 0).find(b"1")


def test_a_file_that_is_no_store_is_named(tmp_path: Path) -> None:
    path = tmp_path / "judge.sqlite"
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(
        CheckpointError, match=r"judge\.sqlite is damaged .*: remove it, and verdicts are asked for again"
    ):
        VerdictStore(path, 1 << 20)


@pytest.mark.parametrize(
    ("status", "calls"), [(500, 3), (503, 3), (401, 1), (404, 1), (400, 1), (302, 1)], ids=lambda value: str(value)
)
def test_what_may_pass_is_tried_again_and_what_cannot_is_not(status: int, calls: int) -> None:
    with judge_server() as server:
        server.status = status
        reason, message = failed(*scores(judge(server, retries=2), inputs(1)))
    assert (reason, len(server.bodies)) == (DropReason.JUDGE_ERROR, calls)
    assert message.startswith(f"answered {status} ")


def test_a_judge_that_is_not_there() -> None:
    with judge_server() as server:
        gone = judge(server, retries=1)
    reason, message = failed(*scores(gone, inputs(1)))
    assert reason == DropReason.JUDGE_ERROR
    assert message.startswith("no answer: ConnectError")
    assert message.endswith("after 1 retries")


def test_silence_and_replies_without_grades_have_reasons_of_their_own() -> None:
    with judge_server(faults=Faults(silence=1.0)) as server:
        reason, message = failed(*scores(judge(server, timeout_s=0.05, retries=1), inputs(1)))
    assert (reason, message) == (DropReason.JUDGE_TIMEOUT, "no answer within 0.05 s; after 1 retries")
    with judge_server(lambda _: "As a language model I like it.") as server:
        reason, message = failed(*scores(judge(server, retries=1), inputs(1)))
    assert reason == DropReason.JUDGE_INVALID
    assert "no grade for every item of the rubric: 'As a language model I like it.'" in message
    assert server.calls["answered"] == 2


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no JSON",
        b"\xff\xfe",
        b"[]",
        b'{"choices": []}',
        b'{"choices": [{"message": {"content": null}}]}',
        b'{"choices": [{"message": {"content": "\xff"}}]}',
        b'{"deep": ' + b"[" * 100_000,
        b" " * (LARGEST + 1),
    ],
    ids=lambda body: repr(body[:50]),
)
def test_an_answer_that_is_no_completion_has_a_reason(body: bytes) -> None:
    with judge_server() as server:
        server.raw = body
        reason, message = failed(*scores(judge(server, retries=1), inputs(1)))
    assert reason == DropReason.JUDGE_INVALID
    assert len(message) < 1000
    assert server.calls.total() == 2


def test_all_wait_when_the_server_asks_for_it() -> None:
    """Waiting is no retry: with none allowed, nothing is lost."""
    limits = Faults(limited=0.5, retry_after="0.01")
    with judge_server(faults=limits) as server:
        assert scores(judge(server, retries=0, concurrency=4), inputs(12)) == [JUDGED] * 12
    assert server.calls["limited"] > 0


def test_a_wait_that_is_too_long_ends_at_the_deadline_without_being_waited_for() -> None:
    with judge_server(faults=Faults(limited=1.0, retry_after="86400")) as server:
        results = scores(judge(server, concurrency=1), inputs(5))
    assert server.calls.total() == 1
    for result in results:
        reason, message = failed(result)
        assert reason == DropReason.JUDGE_TIMEOUT
        assert "of reward.judge.deadline_s=240; the last time: " in message


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("7", 7.0), ("0.5", 0.5), ("", None), ("soon", None), ("-3", None), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0)],
)
def test_retry_after(header: str, seconds: float | None) -> None:
    assert retry_after(header) == seconds


@pytest.mark.parametrize(
    ("limit", "used"), [({"max_calls": 7}, "max_calls=7"), ({"max_tokens": 650}, "max_tokens=650")]
)
@pytest.mark.parametrize("when_spent", ["stop", "drop"])
def test_a_budget_ends_the_run_or_drops(limit: dict[str, int], used: str, when_spent: str, tmp_path: Path) -> None:
    path = tmp_path / "judge.sqlite"

    async def work(opened: ModelJudge) -> tuple[list[RewardResult], str]:
        return await opened.score(inputs(10), [1.0] * 10), opened.always

    with judge_server() as server:
        settings = judge(server, concurrency=1, when_spent=when_spent, **limit)
        results, always = using(settings, work, path)
        assert server.calls.total() == 7
        assert results[:7] == [JUDGED] * 7
        sentence = f"reward.judge.{used} is used up (7 calls with 700 tokens)"
        assert [failed(result) for result in results[7:]] == [(DropReason.JUDGE_BUDGET, sentence)] * 3
        assert always.startswith(sentence) if when_spent == "stop" else not always
        # It is the budget of the run: whoever comes after has what is left of it, and what is known costs nothing.
        results, always = using(settings, work, path)
        assert results[:7] == [JUDGED] * 7
        assert server.calls.total() == 7


def test_a_judge_that_never_answers_is_told_before_the_retries_are_used_up() -> None:
    async def work(opened: ModelJudge) -> str:
        scoring = asyncio.create_task(opened.score(inputs(40), [1.0] * 40))
        while not opened.always:
            assert not scoring.done()
            await asyncio.sleep(0.01)
        scoring.cancel()
        return opened.always

    with judge_server() as server:
        server.status = 500
        always = using(judge(server, retries=1000), work)
    assert always.startswith(f"reward.judge.url={server.url}: answered 500 Internal Server Error")
    assert f"it has failed on every call so far ({ENOUGH} judge_error)" in always
    assert "called with   prompt = 'p'" in always
    assert f"expected      POST {server.url}/chat/completions with model=m" in always


def test_while_completions_wait_it_says_for_what() -> None:
    async def work(opened: ModelJudge) -> None:
        scoring = asyncio.create_task(opened.score(inputs(5), [1.0] * 5))
        while server.now < 2:  # noqa: ASYNC110  (counted in another thread)
            await asyncio.sleep(0.01)
        assert opened.situation.startswith(f"the judge {server.url} has 2 completions, the oldest for 0 s of the 240 s")
        assert "and 3 more wait for a place (reward.judge.concurrency=2)" in opened.situation
        scoring.cancel()

    with judge_server(faults=Faults(silence=1.0)) as server:
        using(judge(server, concurrency=2), work)


def test_whoever_waits_when_it_is_closed_is_told() -> None:
    async def work(opened: ModelJudge) -> list[RewardResult]:
        scoring = asyncio.create_task(opened.score(inputs(5), [1.0] * 5))
        while server.now < 2:  # noqa: ASYNC110  (counted in another thread)
            await asyncio.sleep(0.01)
        await opened.close()
        return [*await scoring, *await opened.score(inputs(1), [1.0])]

    with judge_server(faults=Faults(silence=1.0)) as server:
        found = using(judge(server, concurrency=2), work)
    assert found == [RewardFailure(DropReason.JUDGE_ERROR, "the judge was closed")] * 6


def test_whoever_gives_up_does_not_end_the_call() -> None:
    async def work(opened: ModelJudge) -> None:
        scoring = asyncio.create_task(opened.score(inputs(1), [1.0]))
        while not server.now:  # noqa: ASYNC110  (counted in another thread)
            await asyncio.sleep(0.01)
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scoring
        assert await opened.score(inputs(1), [1.0]) == [JUDGED]

    with judge_server(seconds=0.2) as server:
        using(judge(server), work)
    assert server.calls.total() == 1


def test_a_disk_that_refuses_ends_the_run_with_its_file(tmp_path: Path) -> None:
    store = VerdictStore(tmp_path / "judge.sqlite", 1 << 20)
    sqlite3.connect(tmp_path / "judge.sqlite").execute("DROP TABLE verdicts").close()
    with pytest.raises(StorageError, match=r"no such table.*asyncrl resume.*judge\.sqlite"):
        store.keep(b"1", {"right": 1.0}, "yes")
    store.close()


def test_a_sample_without_a_reward_is_not_judged() -> None:
    failure = RewardFailure(DropReason.REWARD_ERROR, "no reward")
    own = Score(0.25, {"format": 0.5})

    async def work(opened: ModelJudge) -> list[RewardResult]:
        return await opened.score(inputs(3), [failure, own, Score(0.0)])

    with judge_server() as server:
        found = using(judge(server, weight=2.0), work)
    assert found == [
        failure,
        Score(0.25 + 2 * 0.9, {"format": 0.5, "judge_correct": 1.0, "judge_clear": 4.0}),
        Score(2 * 0.9, {"judge_correct": 1.0, "judge_clear": 4.0}),
    ]
    assert server.calls.total() == 2


def test_too_many_parts_are_a_reason() -> None:
    own = Score(0.0, {f"part_{i}": 0.0 for i in range(31)})
    with judge_server() as server:
        result = using(judge(server), lambda opened: opened.score(inputs(1), [own]))
    assert failed(*result) == (DropReason.REWARD_INVALID, "31 parts of the function and 2 of the judge are too many")


# -- the key, and the trial ------------------------------------------------------------------------------------------


def test_the_key_is_sent_and_never_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JUDGE_KEY", f" {KEY}\n")
    path = tmp_path / "judge.sqlite"
    with judge_server(key=KEY) as server:
        assert scores(judge(server, api_key_env="JUDGE_KEY"), inputs(1), path) == [JUDGED]
        server.status = 400
        _, message = failed(*scores(judge(server, api_key_env="JUDGE_KEY"), inputs(2)[1:], path))
        assert message == 'answered 400 Bad Request: {"error":{"message":"as told; Bearer ***"}}'
    assert KEY.encode() not in path.read_bytes()


@pytest.mark.parametrize("key", ["sk-two\nlines", "sk-two words", "sk-\u00e9"])
def test_a_key_that_cannot_be_sent_is_not_told(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", key)
    with judge_server() as server, pytest.raises(ConfigError, match="=JUDGE_KEY holds spaces or letters") as refused:
        ModelJudge(judge(server, api_key_env="JUDGE_KEY"))
    assert "sk-" not in str(refused.value)


def test_a_key_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with (
        judge_server() as server,
        pytest.raises(ConfigError, match=r"reward\.judge\.api_key_env=JUDGE_KEY is not set in"),
    ):
        ModelJudge(judge(server, api_key_env="JUDGE_KEY"))


PROMPT = Prompt(uid="train/0", text="6*7=", answer="42")


def test_the_trial_tells_what_the_judge_says() -> None:
    with judge_server() as server:
        (said,) = asyncio.run(try_judge(judge(server, max_calls=1), PROMPT))
        assert said == f"the judge {server.url} (m) on '42': correct=1, clear=4; 100 tokens"
        server.status = 401
        with pytest.raises(ConfigError) as refused:
            asyncio.run(try_judge(judge(server), PROMPT))
    first, *rest = str(refused.value).splitlines()
    assert first.startswith(f"reward.judge.url={server.url}: answered 401 Unauthorized: ")
    assert first.endswith("it fails before the run has begun")
    assert "  called with   prompt = '6*7='" in rest


def test_the_trial_of_pairs_compares_two() -> None:
    with judge_server(lambda _: "correct: first\nclear: tie") as server:
        (said,) = asyncio.run(try_judge(judge(server, pairs=2), PROMPT))
    assert said == f"the judge {server.url} (m) on '42' against 'I do not know.': correct=first, clear=tie; 100 tokens"


def test_a_judge_that_takes_its_time_is_believed() -> None:
    with judge_server(faults=Faults(silence=1.0)) as server:
        (said,) = asyncio.run(try_judge(judge(server, timeout_s=0.05, retries=0), PROMPT))
    assert said.endswith("no answer within 0.05 s; the run begins all the same")
