"""Records of runs: their schema, and how they are saved, loaded and kept.

Every value in a table comes from a record. Nothing here imports torch.
"""
