"""A rank's life: how ranks are started and end, who watches them, what injects faults, and what a run records.

It knows processes, machines and files, and no model.
"""
