"""Pure Python: in which order a pipeline's passes run, and which layers go on which stage."""
