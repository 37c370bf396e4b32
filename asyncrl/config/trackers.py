"""Which trackers there are, and what stands in the way of those that a run wants."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Literal

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio", "prometheus"]
"""Each is an extra of ours."""
EXPORTS = ("aiohttp_cors", "opencensus", "prometheus_client")
"""Without these of ray[default] a node of Ray exports nothing."""


def problems(trackers: Sequence[TrackerName], cluster: str) -> Iterator[str]:
    """A sentence for each tracker that cannot work here, with the way out."""
    if "prometheus" in trackers and cluster == "inprocess":
        yield "trackers=[prometheus] exports through Ray, and cluster=inprocess has none; use cluster=local"
    for name in trackers:
        what, packages = ("ray[default]", EXPORTS) if name == "prometheus" else (name, (name,))
        if not all(map(is_installed, packages)):
            yield f"trackers=[{name}] needs {what}: pip install 'asyncrl[{name}]', or leave it out"


def is_installed(package: str) -> bool:
    """A mere folder of that name, such as the ./wandb that wandb leaves behind, is found too, but has no origin."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None
