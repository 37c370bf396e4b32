"""The oldest versions that are allowed are those that `make test-versions` runs with."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

TESTS = Path(__file__).parent
ELSEWHERE = {"torch"}
"""Tested on GPU machines, which have the oldest."""


def test_the_oldest_versions_are_tested() -> None:
    project = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["project"]
    allowed = {found.name: _bound(found, ">=") for found in map(Requirement, project["dependencies"])}
    lines = (TESTS / "oldest.txt").read_text().splitlines()
    tested = [Requirement(line) for line in lines if not line.startswith("#")]
    assert {name: bound for name, bound in allowed.items() if name not in ELSEWHERE} == {
        found.name: _bound(found, "==") for found in tested
    }


def _bound(requirement: Requirement, operator: str) -> Version:
    [bound] = [Version(each.version) for each in requirement.specifier if each.operator == operator]
    return bound
