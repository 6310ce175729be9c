"""Data parallel with the variables in one place."""
