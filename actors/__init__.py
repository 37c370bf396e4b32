"""Actors: plain classes with async methods. Ray appears only in `actors.spawn`."""
