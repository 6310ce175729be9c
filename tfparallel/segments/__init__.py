"""A part of a model as a function of its own, with a say in what it keeps for its backward pass."""
