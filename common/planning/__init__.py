"""Memory, time and cost before a run: architectures, memory by part, a step's time, which device holds which layers.

All numbers are projected. It imports no torch, and answers in under a second.
"""
