"""Seeds of independent random streams, derived from what they are for."""

import xxhash


def random_stream(*parts: int | str) -> int:
    """A random stream of its own for each sample, the same in every attempt."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, parts)).encode())
