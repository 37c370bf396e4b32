"""The code on docs/pipelines.md is that of the examples."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_snippets_are_parts_of_the_examples() -> None:
    blocks = re.findall(
        r"```python\n# (examples/\w+\.py)\n(.*?)```", (ROOT / "docs/pipelines.md").read_text(), re.DOTALL
    )
    own = ("reward", "environment", "stage", "parts", "algorithm", "pipeline")
    assert {name for name, _ in blocks} == {"examples/quick_pipeline.py", *(f"examples/own_{name}.py" for name in own)}
    for name, code in blocks:
        assert code in (ROOT / name).read_text(), name
