"""What every other room needs: a run's settings and folders, errors, secrets, and the prefix of printed lines.

It imports no other room, and no torch until an error is looked at.
"""
