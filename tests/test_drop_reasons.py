"""Why a sample was dropped: one list of reasons, which all code uses, with values that old run directories hold."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from asyncrl.drop_reasons import (
    DESCRIPTIONS,
    DropReason,
    Failure,
    UserFunction,
    describe,
    find,
    main_cause,
    stage_reason,
)
from asyncrl.types import Slot, Ticket
from tests.support.buffer_stores import open_buffer
from tests.test_architecture import FILES, REPOSITORY

ON_DISK = {
    "timeout", "stale", "uninformative", "group_incomplete", "engine_error", "unverified",
    "reward_error", "reward_timeout", "reward_invalid",
    "judge_error", "judge_timeout", "judge_invalid", "judge_budget",
    "environment_error", "environment_timeout", "environment_invalid",
    "agent_error", "agent_timeout", "agent_invalid", "teacher_error",
    "stage_error", "stage_timeout", "stage_invalid", "stage",
}  # fmt: skip
"""As directories of earlier releases hold them."""


def test_values_are_those_of_earlier_releases() -> None:
    assert {str(reason) for reason in DropReason} == ON_DISK
    assert stage_reason("too_long") == "stage:too_long"
    assert {DropReason.of_function(kind, how) for kind in get_args(UserFunction) for how in get_args(Failure)} == {
        reason for reason in DropReason if re.match("(reward|environment|agent|stage)_", reason)
    }


def test_every_reason_is_described() -> None:
    assert list(DESCRIPTIONS) == list(DropReason)
    for description in DESCRIPTIONS.values():
        assert all(description), "a label, a meaning and a remedy"
        assert not any(text.endswith(".") or "|" in text or "\n" in text for text in description), "parts of sentences"


def test_any_recorded_string_can_be_read() -> None:
    assert all(find(reason.recorded) is reason for reason in DropReason)
    assert describe("timeout") == DESCRIPTIONS[DropReason.TIMEOUT]
    assert describe("stage:dull").label.endswith(": dull")
    assert describe("stage:dull").meaning == 'one of your stages returned `Drop("dull")`'
    for unknown in ("", "stage", "stage:", "other:dull", "lost_in_space"):
        assert find(unknown) is None
        assert "does not know" in describe(unknown).meaning
    assert describe("lost_in_space").label == "lost in space"


def test_the_main_cause_is_no_consequence() -> None:
    assert main_cause({"group_incomplete": 9, "reward_error": 2, "timeout": 1, "unheard_of": 7}) == "reward_error"
    assert main_cause({"group_incomplete": 9}) is None
    assert main_cause({}) is None


def test_only_known_reasons_enter_the_journal(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path / "buffer")
    ticket = buffer.admit(0.0)
    assert isinstance(ticket, Ticket)
    with pytest.raises(ValueError, match="'tired' is no reason for a drop"):
        buffer.fail(Slot(ticket.group, 0), "tired")
    assert buffer.fail(Slot(ticket.group, 0), stage_reason("tired")).status == "dropped"
    assert buffer.ledger().dropped == {"stage:tired": 1, "group_incomplete": 1}
    assert {type(reason) for reason in (*buffer.ledger().dropped, *buffer.waste())} == {str}


def test_workers_load_it_without_arrays() -> None:
    code = "import sys, asyncrl.drop_reasons; print(*sorted({'numpy', 'torch', 'msgspec'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == ""


# -- no other file spells a reason -------------------------------------------------------------------------------

ORDINARY = {DropReason.TIMEOUT, DropReason.STALE, DropReason.STAGE}
"""Also words for other things: these are only looked for where a reason is given."""
SPELLED = re.compile(r"\b(" + "|".join(reason for reason in DropReason if reason not in ORDINARY) + r")\b|^stage:")
GIVEN_TO = {"Dropped": 1, "fail": 1, "RewardFailure": 0}
"""The position of the reason in calls."""


def spelled(source: str) -> Iterator[int]:
    """Lines in which a reason is written as text; docstrings may name reasons."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in docstrings and SPELLED.search(text):
                yield node.lineno
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in GIVEN_TO:
                given = [*node.args[GIVEN_TO[name] :][:1], *(key.value for key in node.keywords if key.arg == "reason")]
                if any(isinstance(argument, ast.Constant | ast.JoinedStr | ast.BinOp) for argument in given):
                    yield node.lineno
            case _:
                pass


def test_no_file_spells_a_reason() -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}:{line}"
        for path in FILES
        if path.name != "drop_reasons.py"
        for line in spelled(path.read_text())
    ]
    assert not found, "use asyncrl.drop_reasons"


@pytest.mark.parametrize(
    "source",
    [
        'Dropped(group, "timeout")',
        'buffer.fail(slot, "stale", 3)',
        'buffer.fail(slot, reason="stale")',
        'RewardFailure(f"{kind}_error", "")',
        'RewardFailure("stage_" + what, "")',
        'reason = "reward_error"',
        'reason = f"stage:{name}"',
        "sql = \"SELECT 'group_incomplete'\"",
    ],
)
def test_spelled_reasons_are_found(source: str) -> None:
    assert list(spelled(source)) == [1] * len(list(spelled(source))) != []


def test_other_texts_are_left_alone() -> None:
    fine = ['state = "stale"', "fail(slot, DropReason.STALE)", "fail(slot, result.reason)", 'x = f"a stage: {name}"']
    assert not [source for source in fine if list(spelled(source))]
    assert not list(spelled('def f():\n    """Under `reward_error`."""'))
