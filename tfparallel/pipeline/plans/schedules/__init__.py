"""The schedules of the papers, each a function from counts to a `Schedule`."""
