"""Tasks that serve TensorFlow operations to one chief: how they start, are found and end."""
