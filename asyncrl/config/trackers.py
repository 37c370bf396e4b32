"""Which trackers there are, and what stands in the way of those that a run wants.

A new tracker is its name and a line here, and a file with a line in `asyncrl.observe.trackers.registry`.
"""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Literal, NamedTuple

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio", "prometheus"]
"""Each is an extra of ours."""
EXPORTS = ("aiohttp_cors", "opencensus", "prometheus_client")
"""Without these of ray[default] a node of Ray exports nothing."""


class TrackerTraits(NamedTuple):
    """What a tracker needs."""

    packages: tuple[str, ...]
    """Importable names."""
    distribution: str
    """What people install to have them."""
    through_ray: bool = False
    """Ray carries the figures, so that there has to be one."""


TRACKERS: dict[TrackerName, TrackerTraits] = {
    "tensorboard": TrackerTraits(("tensorboard",), "tensorboard"),
    "wandb": TrackerTraits(("wandb",), "wandb"),
    "mlflow": TrackerTraits(("mlflow",), "mlflow"),
    "trackio": TrackerTraits(("trackio",), "trackio"),
    "prometheus": TrackerTraits(EXPORTS, "ray[default]", through_ray=True),
}


def problems(trackers: Sequence[TrackerName], cluster: str) -> Iterator[str]:
    """A sentence for each tracker that cannot work here, with the way out."""
    for name in trackers:
        if TRACKERS[name].through_ray and cluster == "inprocess":
            yield f"trackers=[{name}] exports through Ray, and cluster=inprocess has none; use cluster=local"
    for name in trackers:
        if not all(map(is_installed, TRACKERS[name].packages)):
            yield (
                f"trackers=[{name}] needs {TRACKERS[name].distribution}: pip install 'asyncrl[{name}]', or leave it out"
            )


def is_installed(package: str) -> bool:
    """A mere folder of that name, such as the ./wandb that wandb leaves behind, is found too, but has no origin."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None
