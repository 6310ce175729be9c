"""Data parallel: every replica has all variables, gradients meet before the optimizer."""
