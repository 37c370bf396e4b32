"""The gateway: where harnesses sample over HTTP, and how their calls come to the engines."""
