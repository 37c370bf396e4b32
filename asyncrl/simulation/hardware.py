"""What a cluster is made of: the few numbers of a GPU, its node and its network, and which share of them software
reaches.

Numbers of hardware are the maker's, for one GPU and one direction. Shares are measured; where from is said at each.
"""

from asyncrl.config.base import AboveZero, Chosen, Fraction, NonNegative, Positive, Probability, Settings


class Hardware(Chosen, frozen=True, kw_only=True):
    """Nodes of equal GPUs, with fast links inside a node and a network card for each GPU between nodes."""

    node: Positive = 8
    """GPUs of a node."""
    flops: AboveZero
    """Dense bf16 operations per second of a GPU."""
    memory: AboveZero
    """Bytes per second that a GPU reads."""
    capacity: AboveZero
    """Bytes that a GPU holds."""
    inside: AboveZero = 450e9
    """Bytes per second from a GPU to the others of its node: NVLink 4."""
    between: AboveZero = 50e9
    """Bytes per second from a GPU to other nodes: 400 Gb/s for each."""
    hop_inside: NonNegative = 3.4e-6
    """Seconds from one GPU of a node to the next: what NCCL itself reckons with (src/graph/tuning.cc, Ring, Simple)."""
    hop_between: NonNegative = 14e-6
    """Seconds from one node to the next, likewise."""


class H100(Hardware, frozen=True, kw_only=True, tag="h100"):
    """H100 SXM in a node of eight."""

    flops: AboveZero = 989e12
    memory: AboveZero = 3.35e12
    capacity: AboveZero = 80e9


class H200(Hardware, frozen=True, kw_only=True, tag="h200"):
    """H200 SXM in a node of eight: an H100 with more and faster memory."""

    flops: AboveZero = 989e12
    memory: AboveZero = 4.8e12
    capacity: AboveZero = 141e9


class Reached(Settings, frozen=True):
    """Which share of the hardware's numbers software reaches, and what it adds of its own.

    `memory`, `decoding`, `layer_seconds` and `row_seconds` are fitted to vLLM 0.26 on one H200, `training` to our
    trainer there with activations computed again (docs/simulator.md has the fits).
    """

    memory: Probability = 0.85
    """Of `memory`, while weights and KV cache are read."""
    decoding: Probability = 0.7
    """Of `flops`, in decoding steps of many rows."""
    training: Probability = 0.5
    """Of `flops`, counting what is computed again; of prefilling too."""
    network: Probability = 0.81
    """Of `inside` and `between`: all-gathers of nccl-tests on four nodes of eight H100 make 324 of 400 GB/s."""
    overlap: Fraction = 0.0
    """How much of FSDP's collectives is hidden behind computation, where there is enough of it. 0 fits torchtitan on
    128 H100 best: collectives that run beside computation take processors and memory from it."""
    layer_seconds: NonNegative = 4.5e-5
    """Of a decoding step for each layer: starting its kernels."""
    row_seconds: NonNegative = 1e-5
    """Of a decoding step for each row: sampling."""
