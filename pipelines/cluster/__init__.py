"""Clusters: rules for their files, starting and stopping them, and jobs that run on them."""
