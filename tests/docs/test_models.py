"""The documented families are those that are tested. `python -m tests.docs.test_models` prints the table."""

from asyncrl.models.architectures import architecture
from tests.support.shown_commands import ROOT
from tests.support.tiny_families import FAMILIES

PAGE = ROOT / "docs" / "models.md"
HEAD = ["| family | class of transformers | tested with | rows |", "|---|---|---|---|"]


def table() -> list[str]:
    rows = [
        f"| {each.title} | `{architecture(name)}` | {each.tests} | {each.packing} |" for name, each in FAMILIES.items()
    ]
    return [*HEAD, *sorted(rows)]


def test_the_documented_families_are_the_tested_ones() -> None:
    section = PAGE.read_text().partition("## Tried families")[2].partition("\n## ")[0]
    documented = [line for line in section.splitlines() if line.startswith("|")]
    assert documented == table(), "print it with: python -m tests.docs.test_models"


if __name__ == "__main__":
    print("\n".join(table()))
