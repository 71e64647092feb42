"""Records of runs: their schema, and how they are saved, loaded and kept."""
