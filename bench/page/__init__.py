"""The results page: all runs in one HTML file."""
