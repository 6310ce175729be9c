"""A Keras step as one program that every core of a TPU runs."""
