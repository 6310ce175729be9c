"""Gradients that cross a network in fewer bytes."""
