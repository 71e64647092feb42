"""The machine: a catalogue of GPUs and their prices with the sources, what is found here, and memory that is read.

It imports no torch where nothing was trained.
"""
