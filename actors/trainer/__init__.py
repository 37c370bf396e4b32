"""The trainer: one actor per rank (`actor`), and the group of ranks that acts as one trainer (`group`)."""
