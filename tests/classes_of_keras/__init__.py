"""Every layer, loss, metric and optimizer that Keras has, under a strategy of each kind."""
