"""What every other package needs: a run's settings and folders, errors, secrets, and the prefix of printed lines."""
