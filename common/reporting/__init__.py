"""Runs side by side, from their records: tables for a terminal, pictures, and a page of all runs."""
