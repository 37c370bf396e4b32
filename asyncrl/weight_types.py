"""The part of the vocabulary (asyncrl.types) that tells of weights."""

import msgspec


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor inside a weight publication."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    bytes: int


class Bucket(msgspec.Struct, frozen=True, array_like=True):
    """A range of a publication's bytes that travels, and is checked, on its own."""

    offset: int
    bytes: int
    digest: str


class Probe(msgspec.Struct, frozen=True, array_like=True):
    """What the trainer finds after each of some fixed prompts: the log-probability of the likeliest next token."""

    prompts: tuple[tuple[int, ...], ...]
    logprobs: tuple[float, ...]
    tolerance: float
    """Largest mean difference between an engine and the trainer."""


class Fp8Version(msgspec.Struct, frozen=True, array_like=True):
    """What engines have in FP8 under a version, as the trainer means it."""

    quantized: tuple[str, ...] = ()
    """Names of the quantized tensors, and `kv_cache`; engines compare them with what they quantize."""
    kv_scales: tuple[tuple[float, float, float], ...] = ()
    """Of queries, keys and values in each layer; empty where the engine is to find them."""


class WeightManifest(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What one policy version consists of, and the digest that proves it arrived."""

    version: int
    tensors: tuple[TensorSpec, ...]
    total_bytes: int
    digest: str
    location: str
    """Where a receiver finds the bytes; its meaning belongs to the transport."""
    buckets: tuple[Bucket, ...] = ()
    probe: Probe | None = None
    base: str = ""
    """Digest of the publication that `delta` changes into this one."""
    delta: "WeightManifest | None" = None
    """The changed elements, as a publication of their own; without it every byte is sent."""
    fp8: Fp8Version | None = None
    """Without it nothing is in FP8."""


class WeightAck(msgspec.Struct, frozen=True, array_like=True):
    """An engine's word that it now serves `version`, with the digest of what it really holds."""

    engine: str
    version: int
    digest: str
    reprefilled_tokens: int = 0
    """Tokens of running answers whose keys and values are computed again under the new weights."""
    probe_gap: float | None = None
    """Mean difference to the log-probabilities of the manifest's probe, if it has one."""


class SendOrder(msgspec.Struct, frozen=True, array_like=True):
    """One attempt to bring a version to its receivers."""

    epoch: int = 1
    """Grows when an attempt has failed: what belongs to an earlier one no longer counts."""
    members: tuple[str, ...] = ()
    """Names of the receivers, in the order of their ranks."""
    dense: bool = False
    """Every byte, whatever the receivers should hold already."""
