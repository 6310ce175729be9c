"""`strategy.check`: one step of a user's own model on one device and under the strategy."""
