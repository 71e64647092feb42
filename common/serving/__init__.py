"""After a run: talk to what was tuned, and hand it on."""
