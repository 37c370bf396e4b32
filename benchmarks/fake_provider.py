"""What of `fake_nodes` has to import Ray: the provider, which the autoscaler loads, and a driver that counts nodes."""

import logging
import sys
import time

import ray
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider

LOOK_S = 0.25


class Provider(FakeMultiNodeProvider):
    """Under a name that `provider.module` can give."""


def watch(address: str) -> None:
    """Print time and number of living nodes until killed."""
    ray.init(address=address, logging_level=logging.ERROR)
    while True:
        count = sum(node["Alive"] for node in ray.nodes())
        print(f"nodes {time.time()} {count}\n", end="", flush=True)  # at once, for the autoscaler prints here as well
        time.sleep(LOOK_S)


if __name__ == "__main__":
    watch(sys.argv[1])
