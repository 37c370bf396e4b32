"""Why a sample was dropped: every reason, what it means, and what to do about it.

The journal, `summary.json`, the report and `asyncrl query` hold a reason as its string. A stage of the user's adds
reasons of its own, recorded as `stage:NAME`, and a directory of another release may hold strings that are unknown here.
So whoever reads a recorded reason asks the functions below, which accept any string.

This module imports no arrays: the workers that run the user's functions load it.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal, NamedTuple

UserFunction = Literal["reward", "environment", "agent", "stage"]
Failure = Literal["error", "timeout", "invalid"]


class Description(NamedTuple):
    label: str
    """A few words for a table."""
    meaning: str
    """Completes "<reason> means that ..."."""
    remedy: str
    """What to do about it."""


class DropReason(StrEnum):
    """The value is what is on disk and must not change. `STAGE` is the prefix of the reasons that users name."""

    TIMEOUT = "timeout"
    STALE = "stale"
    UNINFORMATIVE = "uninformative"
    GROUP_INCOMPLETE = "group_incomplete"
    ENGINE_ERROR = "engine_error"
    UNVERIFIED = "unverified"
    REWARD_ERROR = "reward_error"
    REWARD_TIMEOUT = "reward_timeout"
    REWARD_INVALID = "reward_invalid"
    JUDGE_ERROR = "judge_error"
    JUDGE_TIMEOUT = "judge_timeout"
    JUDGE_INVALID = "judge_invalid"
    JUDGE_BUDGET = "judge_budget"
    ENVIRONMENT_ERROR = "environment_error"
    ENVIRONMENT_TIMEOUT = "environment_timeout"
    ENVIRONMENT_INVALID = "environment_invalid"
    AGENT_ERROR = "agent_error"
    AGENT_TIMEOUT = "agent_timeout"
    AGENT_INVALID = "agent_invalid"
    TEACHER_ERROR = "teacher_error"
    STAGE_ERROR = "stage_error"
    STAGE_TIMEOUT = "stage_timeout"
    STAGE_INVALID = "stage_invalid"
    STAGE = "stage"

    @classmethod
    def of_function(cls, function: UserFunction, failure: Failure) -> "DropReason":
        """A call of the user's function failed in this way."""
        return cls(f"{function}_{failure}")

    @property
    def recorded(self) -> str:
        """The form in which it is recorded, for documentation."""
        return f"{self}:NAME" if self is DropReason.STAGE else str(self)


DESCRIPTIONS: Mapping[DropReason, Description] = {
    DropReason.TIMEOUT: Description(
        "not finished in time",
        "the group was not complete `flow.group_timeout_s` after its ticket was issued",
        "raise `flow.group_timeout_s`, or lower `rollout.max_tokens`",
    ),
    DropReason.STALE: Description(
        "too old",
        "the oldest token of the group was more than `max_staleness` policy versions old at delivery",
        "rare, because admission prevents it: raise `max_staleness`, or lower `rollout.max_tokens`",
    ),
    DropReason.UNINFORMATIVE: Description(
        "all rewards of the group equal",
        "all rewards of the group were equal, so its advantages are zero, and `algorithm.dynamic_sampling` is on",
        "choose prompts that the model solves sometimes: these are too easy or too hard",
    ),
    DropReason.GROUP_INCOMPLETE: Description(
        "a sibling failed",
        "another sample of the group failed, and too few were left to be trained on (`flow.incomplete`)",
        "look at the reason of the sample that failed, or set `flow.incomplete=train_rest`",
    ),
    DropReason.ENGINE_ERROR: Description(
        "the engine failed",
        "the engine refused the request or lost it, and goes on with others",
        "compare the length of the prompts with the engine's limit, and read the engine's output",
    ),
    DropReason.UNVERIFIED: Description(
        "sampled with weights that were refused",
        "it was sampled while the engine verified a weight update that then failed its probe",
        "read the error of the weight update in the report or in `events.jsonl`",
    ),
    DropReason.REWARD_ERROR: Description(
        "the reward function failed",
        "the reward function raised an exception, could not be imported, or its process died",
        "fix the function: `asyncrl query RUN failures` shows its first error",
    ),
    DropReason.REWARD_TIMEOUT: Description(
        "the reward function took too long",
        "the reward function took longer than `reward.timeout_s` and was killed",
        "make the function faster, or raise `reward.timeout_s`",
    ),
    DropReason.REWARD_INVALID: Description(
        "the reward was no number",
        "the reward function returned neither a finite number nor valid parts",
        "fix the function: `asyncrl query RUN failures` shows the first invalid value",
    ),
    DropReason.JUDGE_ERROR: Description(
        "the judge failed",
        "the judge could not be reached, or answered with an error, and asking again did not help or was of no use",
        "look at its server: `asyncrl query RUN failures` shows the first error",
    ),
    DropReason.JUDGE_TIMEOUT: Description(
        "the judge took too long",
        "the judge gave no verdict within `reward.judge.timeout_s` for each call and `reward.judge.deadline_s` in all",
        "lower `reward.judge.concurrency`, or raise `reward.judge.timeout_s` and `reward.judge.deadline_s`",
    ),
    DropReason.JUDGE_INVALID: Description(
        "the judge gave no verdict",
        "the judge replied, at every retry, with a text in which an item of the rubric has no grade",
        "read the reply with `asyncrl query RUN failures`, and make the rubric or the template plainer",
    ),
    DropReason.JUDGE_BUDGET: Description(
        "the judge's budget was used up",
        "`reward.judge.max_calls` or `reward.judge.max_tokens` was used up",
        "resume with a higher one",
    ),
    DropReason.ENVIRONMENT_ERROR: Description(
        "the environment failed",
        "the environment function raised an exception, could not be imported, or its process died",
        "fix the function: `asyncrl query RUN failures` shows its first error",
    ),
    DropReason.ENVIRONMENT_TIMEOUT: Description(
        "the environment took too long",
        "the environment function took longer than `environment.timeout_s` and was killed",
        "make the function faster, or raise `environment.timeout_s`",
    ),
    DropReason.ENVIRONMENT_INVALID: Description(
        "the environment gave no text",
        "the environment function returned no text and not None, or text that the chat template cannot hold as a turn",
        "fix the function: `asyncrl query RUN failures` shows the first invalid value",
    ),
    DropReason.AGENT_ERROR: Description(
        "the agent failed",
        "the harness raised an exception, could not be imported, ended with an error, or its process died",
        "fix the harness: `asyncrl query RUN failures` shows its first error",
    ),
    DropReason.AGENT_TIMEOUT: Description(
        "the agent took too long",
        "the episode took longer than `agent.timeout_s` and was ended",
        "make the harness faster, or raise `agent.timeout_s`",
    ),
    DropReason.AGENT_INVALID: Description(
        "the agent gave no result",
        "the harness returned something that is no result, or sampled nothing",
        "fix the harness: `asyncrl query RUN failures` shows the first invalid value",
    ),
    DropReason.TEACHER_ERROR: Description(
        "a teacher failed",
        "a teacher could not compute the log-probabilities of the sample, or they were not finite",
        "read the first error: `asyncrl query RUN failures` shows it",
    ),
    DropReason.STAGE_ERROR: Description(
        "a stage failed",
        "a stage raised an exception, could not be imported, or its process died; this drops every sample of the call",
        "fix the stage: `asyncrl query RUN failures` shows its first error",
    ),
    DropReason.STAGE_TIMEOUT: Description(
        "a stage took too long",
        "a stage took longer than its `timeout_s` and was killed; this drops every sample of the call",
        "make the stage faster, or raise its `timeout_s`",
    ),
    DropReason.STAGE_INVALID: Description(
        "a stage returned no verdict",
        "a stage did not return one `Sample` or `Drop` for each sample; this drops every sample of the call",
        "fix the stage: `asyncrl query RUN failures` shows the first invalid value",
    ),
    DropReason.STAGE: Description(
        "by your stage",
        "one of your stages returned `Drop(NAME)`",
        "nothing, if the stage is right; otherwise change the stage",
    ),
}
CALL_CUT_OFF = "call_cut_off"
"""Of tokens that no sample was dropped for: they are wasted in an episode that goes on."""
_CUT_OFF = Description(
    "calls that were cut off",
    "the harness gave up a call before it was answered, so what had been sampled for it belongs to no turn; the "
    "episode went on",
    "look at the timeouts of the harness's client, and at what it cancels",
)
_BY_VALUE: Mapping[str, DropReason] = {reason.value: reason for reason in DropReason}


def stage_reason(name: str) -> str:
    """The reason of a sample for which a stage of the user's returned `Drop(name)`."""
    return f"{DropReason.STAGE}:{name}"


def find(recorded: str) -> DropReason | None:
    """The member that a recorded reason belongs to; None for one that this release does not know."""
    prefix, colon, name = recorded.partition(":")
    if colon:
        return DropReason.STAGE if prefix == DropReason.STAGE and name else None
    found = _BY_VALUE.get(recorded)
    return None if found is DropReason.STAGE else found


def describe(recorded: str) -> Description:
    """What a recorded reason means, whoever gave it."""
    if recorded == CALL_CUT_OFF:
        return _CUT_OFF
    reason = find(recorded)
    if reason is None:
        return Description(recorded.replace("_", " "), "the release that reads it does not know this reason", "")
    if reason is DropReason.STAGE:
        name = recorded.partition(":")[2]
        label, meaning, remedy = DESCRIPTIONS[reason]
        return Description(f"{label}: {name}", meaning.replace("NAME", f'"{name}"'), remedy)
    return DESCRIPTIONS[reason]


def main_cause(dropped: Mapping[str, int]) -> str | None:
    """The most frequent known reason that explains drops: siblings of failed samples only follow from it."""
    causes = [reason for reason in dropped if find(reason) not in (None, DropReason.GROUP_INCOMPLETE)]
    return max(causes, key=lambda reason: dropped[reason], default=None)
