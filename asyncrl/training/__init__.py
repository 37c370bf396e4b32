"""From groups to weights: advantages, packed batches, forward, optimizer step, diagnostics, checkpoints and export."""
