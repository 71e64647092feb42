"""Callbacks of training: the first step's report of every rank, and rank 0's progress lines."""

from common.training.callbacks import FirstStepReport, ProgressReport, UpdateReport, WorkDone

__all__ = ["FirstStepReport", "ProgressReport", "UpdateReport", "WorkDone"]
