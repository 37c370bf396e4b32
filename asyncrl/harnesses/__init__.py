"""Harnesses that others have written, and parts of your own. Each module needs the extra of its name."""
