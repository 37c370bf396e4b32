"""docs/gateway.md has every cause of a branch."""

import re
from pathlib import Path

from asyncrl.gateway import MEANINGS, BranchCause

PAGE = Path(__file__).parents[2] / "docs" / "gateway.md"


def test_the_documented_causes_are_the_real_ones() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Causes of branches")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == [cause.value for cause in BranchCause]
    assert set(MEANINGS) == set(BranchCause)
