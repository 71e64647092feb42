"""Measured beside a run to judge it: what the machine allows, a pipeline's schedules, Transformers' Trainer."""
