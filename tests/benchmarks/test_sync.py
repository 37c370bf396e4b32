"""The benchmark of weight updates: what it sends, and what its lines say."""

from benchmarks import sync


def test_adapters_are_sent_and_merged_in_another_process() -> None:
    shape = sync.SHAPES["tiny"]
    row = sync.measure("tiny", "shared_memory", "bf16", 1, rank=4)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    factors = 2 * (shape.hidden + queries) + 2 * (shape.hidden + keys) + 3 * (shape.hidden + shape.wide)
    assert row.gigabytes == 4 * 4 * shape.layers * factors / 1e9
    assert row.precision == "r4"
    assert min(row.publish_ms, row.load_ms) > 0
    assert sync.targets([row]) == []
    row.shape, row.transport, row.whole_ms = "qwen3-8b", "cuda_ipc", 15.04
    assert sync.targets([row]) == ["qwen3-8b, cuda_ipc: adapters in 15.0 ms (target 15: NOT held)"]
