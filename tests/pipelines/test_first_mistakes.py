"""A mistake in the user's own functions, as the one who made it sees it: at once, in their words, with their line."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncrl.errors import UserCodeError
from tests.support import quickstart_runs
from tests.support.command import Done, asyncrl

MINE = """
import json

import numpy as np


def always(prompt, completion, answer):
    return float(completion == answer[LATER])


def only_on_trial(prompt, completion, answer):
    # The trial before the run shows the reference and an empty completion, and the run the model's own ones.
    if completion in ("", answer):
        return 1.0
    return json.loads(completion)["points"]


def sometimes(prompt, completion, answer):
    if prompt.startswith(("a1", "a2", "a3")):
        raise KeyError("no such answer")
    return np.bool_(completion == answer)


def text(prompt, completion, answer): return "1.0"
def nothing(prompt, completion, answer): completion == answer
def batch(prompt, completion, answer): return [0.0]
def array(prompt, completion, answer): return np.zeros(())
def no_answer(prompt, completion): return 1.0
def of_empty(prompt, completion, answer): return float(completion.split()[0] == answer)


def environment(prompt, turns, answer):
    return turns[7]


def stage(samples):
    return len(samples)


async def agent(prompt, answer, access):
    raise ConnectionError("no tools today")


def offline(prompt, answer, access):
    return "an answer of its own"


def loss(tokens):
    return -tokens.ratios * tokens.advantage_L


def averaged(tokens):
    return (-tokens.ratio * tokens.advantage_L).mean()


def prompts():
    yield from (f"a{i}b+1=" for i in range(10))
    raise ConnectionError("the database is gone")
"""
SMALL = (*quickstart_runs.SMALL, "name=run", "rollout.max_tokens=24", "steps=100000")


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return file


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(MINE.splitlines(), start=1) if text in line)


def test_a_reward_that_fails_on_its_trial_is_refused_before_anything_starts(
    tmp_path: Path, model: Path, mine: Path
) -> None:
    done = asyncrl("run", *SMALL, f"model.path={model}", f"root={tmp_path}", f"reward.function={mine}:always")
    assert done.code == 2
    number = line_of("answer[LATER]")
    first, *rest = done.err.splitlines()
    assert first.startswith(f"asyncrl: reward.function={mine}:always: NameError: name 'LATER' is not defined")
    assert first.endswith(f"({mine}:{number}); it fails on the first 8 prompts of this run")
    shown = "\n".join(rest)
    assert "  in the line   return float(completion == answer[LATER])" in shown
    assert "  called with   prompt = 'a" in shown
    assert "  expected      always(prompt: str, completion: str, answer: str)" in shown
    assert "  to return     a finite number, or a dict of numbers" in shown
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("text", "digits and _; this is a text: return float(...) of it"),
        ("nothing", "returned None; a reward must be a finite number"),
        ("batch", "the function gets one completion at a time, not a batch"),
        ("array", "this is a ndarray: return its number, as value.item() gives it"),
        ("no_answer", "it is declared as no_answer(prompt, completion), and called with 3 arguments"),
    ],
)
def test_plan_names_what_is_no_reward(tmp_path: Path, model: Path, mine: Path, function: str, said: str) -> None:
    done = asyncrl("plan", *SMALL, f"model.path={model}", f"root={tmp_path}", f"reward.function={mine}:{function}")
    assert done.code == 2
    assert f"reward.function={mine}:{function}" in done.err
    assert said in done.err


def test_plan_shows_what_the_reward_returns(tmp_path: Path, model: Path, mine: Path) -> None:
    settings = (*SMALL, f"model.path={model}", f"root={tmp_path}")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a4b+1=", "answer": "a4b+15$"}\n')
    task = ("task=jsonl", f"task.path={prompts}", "evaluation.prompts=0")
    done = asyncrl("plan", *settings, *task, f"reward.function={mine}:sometimes")
    assert done.code == 0, done.err
    assert "the reward of prompt prompts.jsonl:1, 'a4b+1='\n  '' (an empty completion): 0\n" in done.out
    assert "  'a4b+15$' (the reference): 1\n" in done.out
    done = asyncrl("plan", *settings, f"reward.function={mine}:of_empty")
    assert done.code == 0, done.err
    assert "'' (an empty completion): reward_error: IndexError: list index out of range" in done.out
    assert "such samples would be dropped" in done.out


@pytest.mark.parametrize(
    ("field", "function", "raised", "arguments"),
    [
        ("reward.function", "only_on_trial", "JSONDecodeError", ("prompt = 'a", "completion = '", "answer = 'a")),
        ("environment.function", "environment", "IndexError", ("prompt = 'a", "turns = ['")),
        ("stages", "stage", "returned ", ("prompt = 'a", "completion = '")),
    ],
)
def test_a_function_that_always_fails_ends_the_run_within_seconds(
    tmp_path: Path, model: Path, mine: Path, field: str, function: str, raised: str, arguments: tuple[str, ...]
) -> None:
    given = f"[{mine}:{function}]" if field == "stages" else f"{mine}:{function}"
    own = (f"{field}={given}", "evaluation.prompts=0")
    done = asyncrl("run", *SMALL, f"model.path={model}", f"root={tmp_path}", *own)
    assert done.code == UserCodeError.exit_code == 12, done.out + done.err
    first, *rest = done.err.splitlines()
    assert first.startswith(f"asyncrl: {field}={mine}:{function}: {raised}")
    assert "it has failed on every sample so far (" in first
    shown = "\n".join(rest)
    assert all(text in shown for text in arguments), shown
    assert f"expected      {function}(" in shown
    assert f"when mended   asyncrl resume {tmp_path}/run" in shown
    _ended_in_time(tmp_path, done)


@pytest.mark.parametrize(
    ("function", "raised"),
    [
        ("agent", "ConnectionError: no tools today"),
        ("offline", "it ended without a call of the model: is its client given access.url and access.key?"),
    ],
)
def test_an_agent_that_always_fails_ends_the_run(
    tmp_path: Path, model: Path, mine: Path, function: str, raised: str
) -> None:
    own = (f"agent.function={mine}:{function}", "evaluation.prompts=0")
    done = asyncrl("run", *SMALL, f"model.path={model}", f"root={tmp_path}", *own)
    assert done.code == 12, done.out + done.err
    assert done.err.startswith(f"asyncrl: agent.function={mine}:{function}: {raised}")
    assert f"expected      {function}(prompt: str, answer: str, access: Access)" in done.err
    _ended_in_time(tmp_path, done)


def test_a_program_that_always_fails_ends_the_run(tmp_path: Path, model: Path) -> None:
    program = tmp_path / "agent.py"
    program.write_text('raise SystemExit("no settings file")\n')
    own = (f"agent.command=[{sys.executable},{program}]", "evaluation.prompts=0")
    done = asyncrl("run", *SMALL, f"model.path={model}", f"root={tmp_path}", *own)
    assert done.code == 12, done.out + done.err
    assert done.err.startswith(f"asyncrl: agent.command={sys.executable} {program}: ")
    assert "no settings file" in done.err
    assert "expected      a program that reads a line of JSON" in done.err
    _ended_in_time(tmp_path, done)


def _ended_in_time(tmp_path: Path, done: Done) -> None:
    """Within 20 s of the first completion, with sentences alone."""
    assert "Traceback" not in done.out + done.err
    assert "stack of" not in done.out + done.err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    begun = next(event["time"] for event in events if event["kind"] == "loop_started")
    (failed,) = [event for event in events if event["kind"] == "function_failed"]
    assert failed["time"] - begun < 20, "from before the first completion"


def test_after_the_mistake_is_mended_the_run_goes_on(tmp_path: Path, model: Path, mine: Path) -> None:
    own = (f"reward.function={mine}:only_on_trial", "evaluation.prompts=0", "steps=2")
    done = asyncrl("run", *SMALL, f"model.path={model}", f"root={tmp_path}", *own)
    assert done.code == 12
    mine.write_text(MINE.replace('json.loads(completion)["points"]', "float(len(completion))"))
    quickstart_runs.resume(tmp_path / "run")
    assert quickstart_runs.summary(tmp_path)["steps"] == 2


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("loss", "AttributeError: 'Tokens' object has no attribute 'ratios'"),
        ("averaged", "ValueError: returned a tensor of shape ()"),
    ],
)
def test_a_loss_that_fails_is_named(tmp_path: Path, model: Path, mine: Path, function: str, said: str) -> None:
    own = ("algorithm=custom", f"algorithm.function={mine}:{function}", "evaluation.prompts=0")
    done = asyncrl("run", *SMALL, f"model.path={model}", f"root={tmp_path}", *own)
    assert done.code == 12, done.out + done.err
    assert done.err.startswith(f"asyncrl: algorithm.function={mine}:{function}: {said}")
    assert "expected      f(tokens: Tokens) that returns a tensor with one loss per sampled token" in done.err
    assert "Traceback" not in done.err


def test_a_task_that_fails_is_named_with_its_line(tmp_path: Path, model: Path, mine: Path) -> None:
    own = ("task=python", f"task.function={mine}:prompts", f"reward.function={mine}:sometimes")
    done = asyncrl("run", *SMALL, f"model.path={model}", f"root={tmp_path}", *own)
    assert done.code == 2
    number = line_of("is gone")
    assert f"task.function={mine}:prompts: ConnectionError: the database is gone ({mine}:{number})" in done.err
    assert 'in the line   raise ConnectionError("the database is gone")' in done.err


def test_with_some_failures_the_run_goes_on_and_the_first_of_each_kind_is_shown(
    tmp_path: Path, model: Path, mine: Path
) -> None:
    done = quickstart_runs.run(tmp_path, model, f"reward.function={mine}:sometimes", "evaluation.prompts=0")
    said = f"{mine}:sometimes: reward_error: KeyError: 'no such answer' ({mine}:{line_of('raise KeyError')})"
    assert done.count(said) == 1, done
    assert 'in the line raise KeyError("no such answer")' in done
    (row,) = json.loads(f"[{asyncrl('query', tmp_path / 'run', 'failures', '--format', 'json').out}]")
    assert row["reason"] == "reward_error"
    assert row["message"].startswith("KeyError: 'no such answer'")
    assert row["line"] == 'raise KeyError("no such answer")'
    assert row["prompt"].startswith(("'a1", "'a2", "'a3"))
    assert asyncrl("report", tmp_path / "run").code == 0
    assert "KeyError: 'no such answer'" in (tmp_path / "run" / "report.html").read_text()


def test_the_command_itself_ends_with_the_same_code_and_sentence(tmp_path: Path, model: Path, mine: Path) -> None:
    """Its run is in a process of its own, which another one watches."""
    own = (f"reward.function={mine}:only_on_trial", "evaluation.prompts=0")
    words = quickstart_runs.command(tmp_path, model, *SMALL, *own)
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 12, done.stderr
    assert done.stderr.startswith(f"asyncrl: reward.function={mine}:only_on_trial: JSONDecodeError")
    _ended_in_time(tmp_path, Done(done.returncode, done.stdout, done.stderr))


@pytest.mark.slow
def test_on_ray_the_sentence_comes_within_seconds_of_the_first_completion(
    tmp_path: Path, model: Path, mine: Path
) -> None:
    own = (f"reward.function={mine}:only_on_trial", "cluster=local", "evaluation.prompts=0")
    words = quickstart_runs.command(tmp_path, model, *SMALL, *own)
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        _, error = process.communicate(timeout=200)
    ended = time.time()
    assert process.returncode == 12, error
    assert f"asyncrl: reward.function={mine}:only_on_trial: JSONDecodeError" in error
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    begun = next(event["time"] for event in events if event["kind"] == "loop_started")
    assert ended - begun < 20 + 20, "20 s, and as much for Ray to end"
    failed = next(event["time"] for event in events if event["kind"] == "function_failed")
    assert failed - begun < 20
