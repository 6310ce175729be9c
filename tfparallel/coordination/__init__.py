"""Processes of one job: which they are, what they agree on, who serves whom, who is still there."""
