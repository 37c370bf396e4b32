"""The documented drop reasons are the real ones. `python -m tests.docs.test_drop_reasons` prints the table."""

import re

from asyncrl.drop_reasons import DESCRIPTIONS
from tests.support.shown_commands import ROOT

PAGE = ROOT / "docs" / "buffer.md"
HEAD = ["| reason | meaning | what to do |", "|---|---|---|"]


def table() -> list[str]:
    rows = [f"| `{reason.recorded}` | {text.meaning} | {text.remedy} |" for reason, text in DESCRIPTIONS.items()]
    return [*HEAD, *rows]


def test_the_documented_reasons_are_the_real_ones() -> None:
    section = re.search(r"^## Why a group was dropped$(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert section is not None
    documented = [line for line in section[1].splitlines() if line.startswith("|")]
    assert documented == table(), "print it with: python -m tests.docs.test_drop_reasons"


if __name__ == "__main__":
    print("\n".join(table()))
