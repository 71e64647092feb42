"""Records of runs: their schema, and how they are saved, loaded and kept.

Every figure of a table comes from a record. It imports no torch.
"""
