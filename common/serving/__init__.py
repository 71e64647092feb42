"""After a run: what was tuned is found and loaded, and handed on to others."""
