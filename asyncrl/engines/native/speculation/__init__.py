"""Where drafts come from, on CPU and GPU alike: n-grams of the sequence, or a draft head."""
