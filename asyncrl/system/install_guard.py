"""Refuses mixed installations.

`actors` and `pipelines` are top-level names, and Ray puts the driver's directory on the worker's path: a foreign
folder of the same name there would be loaded without complaint. The check runs in the command line and once inside
every spawned actor.
"""

from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("asyncrl", "actors", "pipelines")


def check() -> None:
    """Raise ImportError when our packages resolve to more than one place."""
    roots: dict[str, Path] = {}
    for name in PACKAGES:
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            raise ImportError(f"package {name!r} is not installed; run `pip install -e .` in the asyncrl checkout")
        roots[name] = Path(spec.origin).resolve().parents[1]
    if len(set(roots.values())) > 1:
        found = ", ".join(f"{name} from {root}" for name, root in roots.items())
        raise ImportError(f"asyncrl, actors and pipelines must come from one place, found {found}")
