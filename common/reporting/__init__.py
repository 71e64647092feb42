"""Runs side by side, from their records: tables for a terminal, and pictures."""
