"""What Ray itself makes of a `ray up` file. Private API of Ray 2.59 to 2.61, here and nowhere else; a test pins it."""

from typing import Any, cast

from asyncrl.errors import ConfigError


def prepared(cluster: dict[str, Any]) -> dict[str, Any]:
    """The cluster with Ray's defaults filled in; ConfigError with the field if Ray's schema does not allow it."""
    import jsonschema  # of Ray's own requirements
    from ray.autoscaler._private import util

    ray = cast(Any, util)
    try:
        full: dict[str, Any] = ray.prepare_config(cluster)
        ray.validate_config(full)
    except jsonschema.ValidationError as error:
        field = ".".join(str(part) for part in error.absolute_path) or "the file"
        raise ConfigError(f"{field}: Ray does not allow it: {error.message}") from None
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"Ray does not take it: {error}") from None
    return full
