"""On the head node: wait until the nodes that a cluster begins with are there.

python -m pipelines.cluster.wait NODES SECONDS
"""

import sys
import time

from actors.runtime.spawn import attached
from asyncrl.errors import AsyncRLError, StallError

LOOK_SECONDS = 1.0


def wait(nodes: int, timeout_s: float) -> None:
    import ray

    end = time.monotonic() + timeout_s
    while (there := sum(node["Alive"] for node in ray.nodes())) < nodes:
        if time.monotonic() > end:
            raise StallError(f"{there} of {nodes} nodes have come within {timeout_s:g} s")
        time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    try:
        with attached("auto"):
            wait(int(sys.argv[1]), float(sys.argv[2]))
    except AsyncRLError as error:
        sys.exit(f"asyncrl: {error}")
