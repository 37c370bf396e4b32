"""A weight version from trainer to engines: manifest and digest, the rules of an update (`epochs`), and the probe."""
