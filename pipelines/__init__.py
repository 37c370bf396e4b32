"""Pipelines: one module per dataflow; the module is the diagram."""
