"""Joins an existing Ray cluster: one that `ray up`, KubeRay or somebody by hand has started."""

import logging
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any, cast

from actors.runtime import auth
from asyncrl.errors import ConfigError


@contextmanager
def attached(address: str) -> Generator[None, None, None]:
    """A connection to an existing cluster. Actors work in the driver's directory wherever their node has it, so that a
    relative path in a setting means the same to all of them."""
    with auth.existing_ray(address):
        import ray

        try:
            _check_access(address)
            everywhere = {"worker_process_setup_hook": _entering(os.getcwd())}
            ray.init(address=address, logging_level=logging.ERROR, runtime_env=everywhere)
        except ConnectionError as error:
            way = "bring one up (docs/scaling.md), or use cluster=local"
            raise ConfigError(f"cluster={address}: no Ray answers there ({_first_line(error)}); {way}") from None
        try:
            yield
        finally:
            ray.shutdown()


def _entering(directory: str) -> Callable[[], None]:
    def enter() -> None:
        with suppress(FileNotFoundError):
            os.chdir(directory)

    return enter


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _check_access(address: str) -> None:
    """Check that our token is accepted. `ray.init` would try for 20 s and then blame the network."""
    from ray import _raylet, exceptions
    from ray._private import services

    gcs = services.canonicalize_bootstrap_address(address)
    if gcs is None or "//" in gcs:  # nothing was found, as Ray will say; or a Ray Client, which has another protocol
        return
    auth.check_reachable(address, gcs)
    try:
        cast(Any, _raylet).GcsClient(address=gcs)
    except exceptions.AuthenticationError:
        raise auth.refused(address) from None
