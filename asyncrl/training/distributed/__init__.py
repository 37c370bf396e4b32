"""Training over several ranks: what they do together (`ranks`), FSDP, and tensors that are read and sent in shards."""
