"""From hand-made pictures to sentences: one for each way in which a run can stand still."""

import msgspec
import pytest

from asyncrl.observe.diagnosis.explain import explain
from asyncrl.observe.diagnosis.snapshot import ActorView, Call, Doing, Judging, SampleAt, Situation, Snapshot
from asyncrl.types import BufferStatus


def said(**fields: object) -> Situation:
    return msgspec.convert({"pid": 7, "place": "here", "last_event": "x", "last_event_s": 2.0, **fields}, Situation)


def buffer(**fields: object) -> ActorView:
    status = {"step": 3, "version": 3, "taken": 1, "complete": 0, "incomplete": 2, "bytes": 0, "replaying": False}
    found = msgspec.convert({**status, **fields}, BufferStatus)
    return ActorView(name="buffer", said=msgspec.structs.replace(said(), buffer=found))


def snapshot(*actors: ActorView, calls: tuple[Call, ...], **fields: object) -> Snapshot:
    given = {"idle_s": 64.0, "last_progress": "an update", "group_timeout_s": 300.0, "reward_function": "my.py:f"}
    return Snapshot(calls=calls, actors={view.name: view for view in actors}, **(given | fields))


TAKE = Call(actor="buffer", method="take", seconds=64)
GENERATE = Call(actor="rollout-2", method="generate", seconds=70, slots=((81, 2), (81, 3)))
MISSING = buffer(oldest_group=81, missing=(3,))
LOAD = Call(actor="rollout-2", method="load_weights", seconds=60)
ACCUMULATE = Call(actor="trainer", method="accumulate", seconds=64)
ADMIT = Call(actor="buffer", method="admit", seconds=64)


def rollout(stage: str = "", health: str = "answers", silent_s: float = 0.0, **fields: object) -> ActorView:
    samples = (SampleAt(81, 3, stage, 64.0),) if stage else ()
    found = msgspec.structs.replace(said(running=3, waiting=1), samples=samples, num_samples=len(samples), **fields)
    return ActorView(name="rollout-2", health=health, silent_s=silent_s, process="sleeps", still_s=62, said=found)


CASES = {
    "a rollout is stopped": (
        snapshot(MISSING, rollout("generate", "stopped", 64), calls=(GENERATE, ADMIT, TAKE)),
        "trainer waits for group 81: sample 3 is on rollout-2, which is stopped (SIGSTOP) and has not answered for "
        "64 s, last event 66 s ago: x",
        "rollout-2",
    ),
    "a rollout is silent, for another reason": (
        snapshot(MISSING, rollout("generate", "silent", 64), calls=(GENERATE, TAKE)),
        "trainer waits for group 81: sample 3 is on rollout-2, which has not answered for 64 s (its process sleeps), "
        "last event 66 s ago: x",
        "rollout-2",
    ),
    "a rollout is dead": (
        snapshot(MISSING, ActorView(name="rollout-2", health="dead"), calls=(GENERATE, TAKE)),
        "trainer waits for group 81: sample 3 is on rollout-2, which is dead",
        "rollout-2",
    ),
    "an engine hangs": (
        snapshot(MISSING, rollout("generate"), calls=(GENERATE, TAKE)),
        "trainer waits for group 81: sample 3 has been in generation on rollout-2 for 64 s, its engine (3 "
        "running, 1 waiting) made its last step 62 s ago, last event 2 s ago: x",
        "rollout-2",
    ),
    "a sample was lost by an actor that still has its call": (
        snapshot(MISSING, rollout(), calls=(GENERATE, TAKE)),
        "trainer waits for group 81: sample 3 is on rollout-2, which answers but does not know it any more: it was "
        "lost, last event 2 s ago: x, its group ends flow.group_timeout_s=300 s after admission",
        "rollout-2",
    ),
    "a sample was lost by an actor that is done": (
        snapshot(MISSING, rollout(), calls=(TAKE,), ended={81: "rollout-2"}),
        "trainer waits for group 81: sample 3 was sent to rollout-2, which says that it is done: it was lost, its "
        "group ends flow.group_timeout_s=300 s after admission",
        None,
    ),
    "a sample was never sent": (
        snapshot(MISSING, calls=(TAKE,)),
        "trainer waits for group 81: sample 3 was sent to no engine, its group ends flow.group_timeout_s=300 s after "
        "admission",
        None,
    ),
    "the reward function hangs": (
        snapshot(
            MISSING,
            rollout("reward"),
            ActorView(name="reward", said=msgspec.structs.replace(said(), judging=(Judging(99, 63.0, 500.0),))),
            calls=(GENERATE, TAKE),
        ),
        "trainer waits for group 81: sample 3 of rollout-2 has waited 64 s for its reward, the reward function my.py:f "
        "(process 99) has been at one sample for 63 s of the 500 s that it may take",
        "reward",
    ),
    "the reward function is stopped": (
        snapshot(
            MISSING,
            rollout("reward"),
            ActorView(name="reward", said=msgspec.structs.replace(said(), judging=(Judging(99, 63.0, 500.0, True),))),
            calls=(GENERATE, TAKE),
        ),
        "trainer waits for group 81: sample 3 of rollout-2 has waited 64 s for its reward, the reward function my.py:f "
        "(process 99) has been stopped (SIGSTOP) for 63 s of the 500 s that it may take",
        "reward",
    ),
    "the judge is slow": (
        snapshot(
            MISSING,
            rollout("reward"),
            ActorView(
                name="reward", said=msgspec.structs.replace(said(), judge="the judge http://j has 3 completions")
            ),
            calls=(GENERATE, TAKE),
        ),
        "trainer waits for group 81: sample 3 of rollout-2 has waited 64 s for its reward, the judge http://j has 3 "
        "completions",
        "reward",
    ),
    "the others wait to be compared with one that is being generated": (
        snapshot(
            buffer(oldest_group=81, missing=(1, 3)),
            rollout("generate"),
            ActorView(name="reward", said=msgspec.structs.replace(said(), samples=(SampleAt(81, 1, "compare", 99.0),))),
            calls=(GENERATE, TAKE),
        ),
        "trainer waits for group 81: sample 3 has been in generation on rollout-2 for 64 s, its engine (3 running, 1 "
        "waiting) made its last step 62 s ago, last event 2 s ago: x",
        "rollout-2",
    ),
    "the judge compares the last ones": (
        snapshot(
            buffer(oldest_group=81, missing=(1, 3)),
            rollout(),
            ActorView(
                name="reward",
                said=msgspec.structs.replace(
                    said(),
                    samples=(SampleAt(81, 1, "compare", 99.0), SampleAt(81, 3, "compare", 9.0)),
                    judge="the judge http://j has 3 comparisons",
                ),
            ),
            calls=(TAKE,),
        ),
        "trainer waits for group 81: sample 1 has waited 99 s to be compared with others of its group, the judge "
        "http://j has 3 comparisons",
        "reward",
    ),
    "the reward actor is stopped": (
        snapshot(
            MISSING,
            rollout("reward"),
            ActorView(name="reward", health="stopped", silent_s=64, said=said()),
            calls=(GENERATE, TAKE),
        ),
        "trainer waits for group 81: sample 3 of rollout-2 has waited 64 s for its reward, the reward actor is stopped "
        "(SIGSTOP) and has not answered for 64 s, last event 66 s ago: x",
        "reward",
    ),
    "every sample is dropped": (
        snapshot(
            MISSING, rollout("generate"), calls=(GENERATE, TAKE), idle_s=300.0, dropped={"reward_error": 9, "late": 3}
        ),
        "trainer waits for its next groups: 12 samples were dropped since the last progress (9 reward_error, 3 late), "
        "reward_error means that the reward function raised an exception, could not be imported, or its process died, "
        "so look at the reward function my.py:f",
        "reward",
    ),
    "the buffer is stopped": (
        snapshot(ActorView(name="buffer", health="stopped", silent_s=64, said=said()), calls=(ADMIT, TAKE)),
        "trainer waits for its next groups: the buffer is stopped (SIGSTOP) and has not answered for 64 s, last event "
        "66 s ago: x",
        "buffer",
    ),
    "the buffer is stopped while the trainer reads from it": (
        snapshot(
            ActorView(name="trainer", said=said(doing=[Doing("reading groups for step 3", 64.0, "buffer")])),
            ActorView(name="buffer", health="stopped", silent_s=64, said=said()),
            calls=(ACCUMULATE,),
        ),
        "the run waits for the trainer to do a forward and backward: it has waited 64 s for buffer (reading groups for "
        "step 3), which is stopped (SIGSTOP) and has not answered for 64 s, last event 66 s ago: x",
        "buffer",
    ),
    "the trainer is stopped, and the buffer full": (
        snapshot(
            buffer(complete=8, refusal="memory: 90 of 100 bytes are held or reserved, a group needs 20"),
            ActorView(name="trainer", health="stopped", silent_s=64, said=said()),
            calls=(ADMIT, ACCUMULATE),
        ),
        "the run waits for the trainer to do a forward and backward: it is stopped (SIGSTOP) and has not answered for "
        "64 s, last event 66 s ago: x, meanwhile 8 complete groups wait in the buffer and no new one is admitted "
        "(memory: 90 of 100 bytes are held or reserved, a group needs 20)",
        "trainer",
    ),
    "a teacher hangs": (
        snapshot(
            MISSING,
            rollout("teacher"),
            ActorView(name="teacher-0", said=said(doing=[Doing("log-probabilities of 2 samples", 1.0)])),
            ActorView(
                name="teacher-1", health="busy", said=said(doing=[Doing("log-probabilities of 9 samples", 64.0)])
            ),
            calls=(GENERATE, TAKE),
        ),
        "trainer waits for group 81: sample 3 of rollout-2 has waited 64 s for its teachers, teacher-1 has been at it "
        "for 64 s (log-probabilities of 9 samples) and takes nothing else meanwhile",
        "teacher-1",
    ),
    "a teacher is stopped": (
        snapshot(
            MISSING,
            rollout("teacher"),
            ActorView(name="teacher-0", health="stopped", silent_s=64, said=said()),
            calls=(GENERATE, TAKE),
        ),
        "trainer waits for group 81: sample 3 of rollout-2 has waited 64 s for its teachers, teacher-0 is stopped "
        "(SIGSTOP) and has not answered for 64 s, last event 66 s ago: x",
        "teacher-0",
    ),
    "the trainer computes for ever": (
        snapshot(
            ActorView(name="trainer", health="busy", said=said(doing=[Doing("forward and backward for step 3", 64.0)])),
            calls=(ACCUMULATE,),
        ),
        "the run waits for the trainer to do a forward and backward: it has been at it for 64 s (forward and backward "
        "for step 3) and takes nothing else meanwhile",
        "trainer",
    ),
    "a version is not acknowledged, and the engines wait for it": (
        snapshot(
            buffer(incomplete=0, refusal="staleness: 0 groups wait to be trained, version 3 is not published"),
            rollout(doing=(Doing("loading version 3", 60.0),)),
            calls=(ADMIT, LOAD, TAKE),
        ),
        "trainer waits for its next groups: none is being generated and none is admitted (staleness: 0 groups wait to "
        "be trained, version 3 is not published), rollout-2 has not acknowledged the new version for 60 s, it has been "
        "at it for 60 s (loading version 3)",
        "rollout-2",
    ),
    "a version is not acknowledged by a stopped engine": (
        snapshot(rollout(health="stopped", silent_s=61), calls=(LOAD,)),
        "the run waits for a publication: rollout-2 has not acknowledged the new version for 60 s, it is stopped "
        "(SIGSTOP) and has not answered for 61 s, last event 63 s ago: x",
        "rollout-2",
    ),
    "an evaluation hangs": (
        snapshot(rollout(), calls=(Call(actor="rollout-2", method="evaluate", seconds=64),)),
        "the evaluation waits for completions: rollout-2 has worked on held-out prompts for 64 s, its engine (3 "
        "running, 1 waiting) made its last step 62 s ago, last event 2 s ago: x",
        "rollout-2",
    ),
    "an actor cannot be placed": (
        snapshot(calls=(Call(actor="rollout-1", method="spawn", seconds=900),)),
        "the run waits for rollout-1 to be placed and started: that has taken 900 s (is there a free core for it?)",
        "rollout-1",
    ),
    "the drafter is stopped when it has to save": (
        snapshot(
            ActorView(name="drafter", health="stopped", silent_s=64, said=said()),
            calls=(Call(actor="drafter", method="save", seconds=64), ADMIT),
        ),
        "the run waits for drafter.save: drafter is stopped (SIGSTOP) and has not answered for 64 s, last event 66 s "
        "ago: x",
        "drafter",
    ),
    "the pipeline itself hangs": (
        snapshot(calls=(ADMIT,), driver_blocked=True, driver_at="loss (mine.py:3)"),
        "the run waits for no actor: its own event loop is blocked, the main thread is in loss (mine.py:3)",
        None,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_sentence(case: str) -> None:
    given, sentence, suspect = CASES[case]
    found = explain(given)
    assert found.sentence == sentence
    assert found.chain[0] == f"no progress for {given.idle_s:.0f} s, the last was an update"
    assert found.suspects[:1] == ((suspect,) if suspect else ())


def test_a_picture_of_nothing_is_explained_as_well() -> None:
    assert explain(snapshot(calls=())).sentence.startswith("the run waits for no actor: its own event loop is idle")
    assert explain(snapshot(calls=(TAKE,))).sentence.endswith("the buffer has not reported yet")
