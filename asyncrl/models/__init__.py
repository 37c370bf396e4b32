"""Decoder models in torch: Hugging Face checkpoints, layers, LoRA, and the packed forward of training."""
