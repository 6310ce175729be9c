"""Pipeline parallelism: the layers of a model on several devices, a batch in microbatches."""
