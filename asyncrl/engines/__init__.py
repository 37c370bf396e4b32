"""Engines that generate completions: the interface (`base`), the native one, vLLM, a fake one, and their registry."""
