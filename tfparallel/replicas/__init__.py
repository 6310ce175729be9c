"""What every strategy shares: a Keras step cut over replicas, and variables that exist for each."""
