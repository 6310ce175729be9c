"""Methods together: what divides layers, and what divides the matrices in them."""
