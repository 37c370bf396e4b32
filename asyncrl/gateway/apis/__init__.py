"""The forms in which a call can come: one file for each API."""
