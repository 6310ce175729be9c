"""What training gives for its time: shares of the wall time, noise of gradients, goodput."""
