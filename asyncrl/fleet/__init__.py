"""Policies of the fleet, without Ray or clocks: its members, placement, staleness, elastic size, requests in flight."""
