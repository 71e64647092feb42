"""Rows of a run: read, checked, divided into splits, turned into tokens, and dealt out to ranks in batches."""
