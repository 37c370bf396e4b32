"""Actors: plain classes with async methods. `actors.runtime` is the only part that knows Ray."""
