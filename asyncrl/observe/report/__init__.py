"""The HTML report of a run: figures, curves, time breakdown, samples and waste, in one page that works offline."""
