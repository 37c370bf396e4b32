"""Many completions judged at a time: each is asked about once, retried, and in the end has a verdict or a reason.

A place (of `concurrency`) is held over a completion's retries, so a server that fails is asked less. When the server
asks to wait, all wait.
"""

import asyncio
import hashlib
import random
import time
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from asyncrl.config.judge import Judge
from asyncrl.data.reward_parts import MOST
from asyncrl.drop_reasons import DropReason
from asyncrl.judges.client import CallFailed, Client
from asyncrl.judges.form import Asked, Form, Points
from asyncrl.judges.store import JudgeStats, VerdictStore
from asyncrl.user_code.failures import CallRecord, shortened
from asyncrl.user_code.protocol import RewardFailure, RewardInput, RewardResult
from asyncrl.user_code.score import Score

PREFIX = "judge_"
"""Of the parts of a reward that a judge gave."""
FUNCTION = "function"
"""The part that the reward function's number becomes, where it has no parts of its own."""
LONGEST_BACKOFF_S = 30.0
OVER = "the judge was closed"
WAIT_S = 1.0
"""First wait for a server that asks for one and does not say how long."""

Verdict = Points | RewardFailure


class _Call(NamedTuple):
    given: Asked
    body: dict[str, Any]
    key: bytes
    since: float


class ModelJudge:
    """The judge of a run."""

    def __init__(self, settings: Judge, path: Path | None = None) -> None:
        """`path`: where verdicts and costs are kept. ConfigError where the template or the key cannot be used,
        MissingDependencyError without the HTTP library."""
        self._settings = settings
        self._form = Form(settings)
        self._client = Client(settings)
        self.store = VerdictStore(path, settings.cache_bytes)
        self._places = asyncio.Semaphore(settings.concurrency)
        self._asking: dict[bytes, asyncio.Task[Verdict]] = {}
        self._since: dict[bytes, float] = {}
        """Completions, or pairs of them, that have a place."""
        self._open: list[list[RewardResult]] = []
        """Results of calls of `score` that have not returned."""
        self._not_before = 0.0
        self._limited_in_a_row = 0
        self._answered = self._closed = False
        self._last_failure = ""
        self.record = CallRecord(settings)
        self._calls = CallRecord(settings, "call")

    @property
    def stats(self) -> JudgeStats:
        return self.store.stats

    @property
    def items(self) -> Collection[str]:
        """Names of what it is asked."""
        return self._settings.items

    async def score(self, inputs: Sequence[RewardInput], rewards: Sequence[RewardResult]) -> list[RewardResult]:
        """The rewards, each with what the judge adds to it. A sample that has failed already is not judged."""
        results = list(rewards)
        self._open.append(results)
        try:
            judged = (at for at, reward in enumerate(rewards) if not isinstance(reward, RewardFailure))
            await asyncio.gather(*(self._score(results, at, inputs[at]) for at in judged))
        finally:
            self._open = [each for each in self._open if each is not results]
        return results

    async def _score(self, results: list[RewardResult], at: int, given: RewardInput) -> None:
        came = time.monotonic()
        verdict = await self.verdict(given)
        self.stats.waited_seconds += time.monotonic() - came
        reward = results[at]
        assert not isinstance(reward, RewardFailure)
        if isinstance(verdict, RewardFailure):
            self.failed(verdict)
            results[at] = verdict
        else:
            results[at] = self.added(reward, verdict)

    def failed(self, verdict: RewardFailure) -> None:
        """A completion gets no reward because of it."""
        if verdict.message != OVER:
            self.stats.failures += 1

    def added(self, reward: float | Score, points: Points) -> RewardResult:
        """A reward with what the judge gave."""
        parts = {f"{PREFIX}{name}": grade for name, grade in points.items()}
        score = reward if isinstance(reward, Score) else Score(reward, {FUNCTION: reward})
        own, total = score.parts, score.total
        if len(own | parts) > MOST:
            return RewardFailure(
                DropReason.REWARD_INVALID,
                f"{len(own)} parts of the function and {len(parts)} of the judge are too many",
            )
        return Score(total + self._settings.weight * self._form.score(points), own | parts)

    def can_tell(self, given: Asked, other: Asked) -> bool:
        """Whether the judge reads two different texts."""
        return self._form.body(given) != self._form.body(other)

    async def verdict(self, given: Asked) -> Verdict:
        """From the cache, from a call that is under way for the same text, or from a call of its own."""
        if self._closed:
            return RewardFailure(DropReason.JUDGE_ERROR, OVER)
        body = self._form.body(given)
        key = verdict_key(body, self._settings)
        if (points := self.store.find(key)) is not None:
            self.stats.cache_hits += 1
            return points
        asking = self._asking.get(key)
        if asking is None:
            asking = self._asking[key] = asyncio.create_task(self._in_a_place(given, body, key))
            asking.add_done_callback(lambda _: self._asking.pop(key, None))
        else:
            self.stats.cache_hits += 1
        # Who waits may be given up; what was asked is paid for, and others may wait for it.
        try:
            verdict = await asyncio.shield(asking)
        except asyncio.CancelledError:
            if not asking.cancelled():
                raise
            return RewardFailure(DropReason.JUDGE_ERROR, OVER)
        if isinstance(verdict, RewardFailure):
            self.record.add(given, verdict)
        return verdict

    async def _in_a_place(self, given: Asked, body: dict[str, Any], key: bytes) -> Verdict:
        async with self._places:
            self._since[key] = begun = time.monotonic()
            try:
                return await self._ask(_Call(given, body, key, begun))
            finally:
                del self._since[key]
                self.store.note_cost()

    async def _ask(self, call: _Call) -> Verdict:
        """Until there is a verdict, or no use in asking again."""
        retries, last = 0, "it had asked to be left alone"
        while True:
            await self._until_welcome(call)
            left_s = self._left_s(call)
            if left_s <= 0 or self._not_before > time.monotonic():
                return self._late(last, call)
            if spent := self.spent:
                return RewardFailure(DropReason.JUDGE_BUDGET, spent)
            outcome = await self._attempt(call, min(self._settings.timeout_s, left_s))
            if not isinstance(outcome, CallFailed):
                return outcome
            last = outcome.message
            if outcome.wait_s is not None:
                self._wait_all(outcome.wait_s)
                continue
            self._last_failure = outcome.message
            failure = RewardFailure(outcome.reason, outcome.message)
            self._calls.add(call.given, failure)
            if outcome.hopeless or retries == self._settings.retries:
                return failure if not retries else self._after(failure, retries)
            await asyncio.sleep(min(self._backoff_s(retries), max(0.0, self._left_s(call))))
            retries += 1
            self.stats.retries += 1

    async def _attempt(self, call: _Call, limit_s: float) -> Points | CallFailed:
        begun = time.monotonic()
        self.stats.calls += 1
        try:
            reply = await self._client.call(call.body, limit_s)
        finally:
            self.stats.call_seconds += time.monotonic() - begun
        if isinstance(reply, CallFailed):
            return reply
        self._limited_in_a_row = 0
        self.stats.prompt_tokens += reply.prompt_tokens
        self.stats.reply_tokens += reply.reply_tokens
        if (points := self._form.read(reply.text)) is None:
            return CallFailed(
                reason=DropReason.JUDGE_INVALID,
                message=f"its reply has no grade for every item of the rubric: {shortened(reply.text)}",
            )
        self._answered = True
        self._calls.add(call.given, points)
        self.stats.verdicts += 1
        self.store.keep(call.key, points, reply.text)
        return points

    # -- waiting -------------------------------------------------------------------------------------------------

    def _left_s(self, call: _Call) -> float:
        return call.since + self._settings.deadline_s - time.monotonic()

    def _backoff_s(self, retries: int) -> float:
        """Waits grow only for a judge that has answered at some time: one that never does is told soon."""
        longest = self._settings.backoff_s * 2**retries if self._answered else self._settings.backoff_s
        return min(longest, LONGEST_BACKOFF_S) * random.uniform(0.5, 1.5)

    def _wait_all(self, wait_s: float) -> None:
        """The server has named a time, or only asked for some."""
        self.stats.rate_limited += 1
        wait_s = wait_s or min(WAIT_S * 2 ** min(self._limited_in_a_row, 10), LONGEST_BACKOFF_S)
        self._limited_in_a_row += 1
        self._not_before = max(self._not_before, time.monotonic() + wait_s)

    async def _until_welcome(self, call: _Call) -> None:
        """Until the server may be asked again; not at all where that is too late for this completion."""
        while (wait_s := self._not_before - time.monotonic()) > 0:
            if wait_s >= self._left_s(call):
                return
            await asyncio.sleep(wait_s * random.uniform(1.0, 1.1))  # not all in the same moment

    def _late(self, last: str, call: _Call) -> RewardFailure:
        passed = time.monotonic() - call.since
        limit = f"no verdict after {passed:.0f} s of reward.judge.deadline_s={self._settings.deadline_s:g}"
        failure = RewardFailure(DropReason.JUDGE_TIMEOUT, f"{limit}; the last time: {last}")
        self._calls.add(call.given, failure)
        return failure

    def _after(self, failure: RewardFailure, retries: int) -> RewardFailure:
        return msgspec.structs.replace(failure, message=f"{failure.message}; after {retries} retries")

    # -- what it says of itself ----------------------------------------------------------------------------------

    @property
    def spent(self) -> str:
        """Which budget is used up, in a sentence; empty while none is."""
        settings, stats = self._settings, self.stats
        used = f"{stats.calls:,} calls with {stats.tokens:,} tokens"
        if 0 < settings.max_calls <= stats.calls:
            return f"reward.judge.max_calls={settings.max_calls} is used up ({used})"
        if 0 < settings.max_tokens <= stats.tokens:
            return f"reward.judge.max_tokens={settings.max_tokens} is used up ({used})"
        return ""

    @property
    def always(self) -> str:
        """What ends the run: a judge that never answers, or a budget that is used up."""
        if self._settings.when_spent == "stop" and DropReason.JUDGE_BUDGET in {
            each.reason for each in self.record.first
        }:
            return f"{self.spent}: raise it, or set reward.judge.when_spent=drop, when you resume the run"
        return self._calls.always

    @property
    def failing(self) -> dict[str, int]:
        """Samples without a verdict whose siblings are still being judged, by reason: nobody else knows of them yet."""
        return dict(
            Counter(one.reason for each in list(self._open) for one in list(each) if isinstance(one, RewardFailure))
        )

    @property
    def situation(self) -> str:
        """Where it stands while completions wait for it, for whoever asks why nothing happens."""
        since = list(self._since.values())
        if not since:
            return ""
        now, settings = time.monotonic(), self._settings
        what = "comparisons" if settings.pairs else "completions"
        words = (
            f"the judge {settings.url} has {len(since)} {what}, the oldest for {now - min(since):.0f} s of the "
            f"{settings.deadline_s:g} s that it may take (reward.judge.deadline_s)"
        )
        if queued := len(self._asking) - len(since):
            words += f", and {queued} more wait for a place (reward.judge.concurrency={settings.concurrency})"
        if (wait_s := self._not_before - now) > 0:
            words += f"; it has asked to be left alone for {wait_s:.0f} s more"
        return words + (f"; the last failure: {self._last_failure}" if self._last_failure else "")

    async def close(self) -> None:
        """End the calls; samples still under way fail. Idempotent."""
        if self._closed:
            return
        self._closed = True
        asking = list(self._asking.values())
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await self._client.close()
        self.store.note_cost()
        self.store.close()


def verdict_key(body: dict[str, Any], settings: Judge) -> bytes:
    """Of all that a verdict depends on. The server's address is none of it: it may move between two attempts."""
    whole = msgspec.json.encode([body, settings.rubric], order="deterministic")
    return hashlib.sha256(whole).digest()
