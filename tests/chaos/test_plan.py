"""Which faults, on whom, when: from the seed alone. And that damage is what the checker takes it for."""

import math
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.chaos import damage
from asyncrl.chaos.plan import KINDS, plan, roles
from asyncrl.chaos.rewards import faulty, write_wrapper
from asyncrl.config import Rollout, Run
from asyncrl.errors import ConfigError
from asyncrl.system.user_functions import find_function
from tests.chaos.test_check import check, small_run, violation

AMONG = roles(Run(rollout=Rollout(replicas=2)))


def test_every_process_of_a_run_has_a_role() -> None:
    assert AMONG == ["driver", "buffer", "reward", "trainer", "rollout-0", "rollout-1"]
    assert roles(Run(cluster="inprocess")) == ["driver"]


@given(seed=st.integers(0, 2**32), kinds=st.lists(st.sampled_from(list(KINDS)), unique=True), rounds=st.integers(0, 40))
def test_a_plan_is_a_function_of_its_seed(seed: int, kinds: list[str], rounds: int) -> None:
    faults = plan(seed, kinds, rounds, AMONG)
    assert faults == plan(seed, kinds, rounds, AMONG)
    assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)
    assert len(faults) in (0, rounds)
    dealt = Counter((fault.kind, fault.role) for fault in faults)
    assert not dealt or max(dealt.values()) - min(dealt.values()) <= 1, "nobody is hit twice before everybody is once"
    assert all(fault.kind != "segv" or fault.role != "driver" for fault in faults)


def test_thirty_kills_hit_each_of_six_roles_five_times() -> None:
    assert Counter(fault.role for fault in plan(5, ["kill"], 30, AMONG)) == dict.fromkeys(AMONG, 5)
    assert plan(1, ["kill", "stop"], 12, AMONG) != plan(2, ["kill", "stop"], 12, AMONG)


def test_an_unknown_fault_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--faults meteor is none of kill, stop"):
        plan(0, ["kill", "meteor"], 3, AMONG)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), closed=st.booleans())
def test_a_flip_is_always_found_and_a_tear_never_taken_for_damage(
    tmp_path_factory: pytest.TempPathFactory, seed: int, closed: bool
) -> None:
    directory = tmp_path_factory.mktemp("run") / "run"
    small_run(directory, close=closed)
    flipped = damage.flip(directory, random.Random(seed))
    assert flipped is not None
    assert f"{flipped.path.name} is damaged at offset" in violation(directory)
    flipped.toggle()
    assert check(directory).sound
    torn = damage.tear(directory, random.Random(seed))
    assert (torn is None) == closed
    found = check(directory)
    assert found.sound
    assert (found.log.torn_bytes + found.journal.torn_bytes > 0) != closed
    shutil.rmtree(directory)


def test_the_wrapper_of_a_reward_fails_by_content_and_seed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def judge(prompt, completion, answer):\n    return float(len(completion))\n")
    location = write_wrapper(tmp_path / "wrapped.py", f"{tmp_path}/mine.py:judge", 7, ["nan_reward"], samples=1000)
    reward, inner = find_function(location), find_function(f"{tmp_path}/mine.py:judge")
    values = [reward("p", "x" * n, "a") for n in range(2000)]
    assert [reward("p", "x" * n, "a") for n in range(20)] == values[:20]
    bad = sum(map(math.isnan, values))
    assert 5 < bad < 50
    assert all(value == n for n, value in enumerate(values) if not math.isnan(value))
    assert math.isnan(faulty(inner, 8, slow=0.0, nan=1.0)("p", "x", "a"))
