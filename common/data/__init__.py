"""Rows of a run: read, checked, divided into splits, turned into tokens, and dealt out to ranks in batches.

What is wrong with a file, a row, a picture or a chat template is refused by `BadInputError`, with where it stands.
"""
