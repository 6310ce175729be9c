"""What a cluster takes to run a job: a file for Slurm, Kubernetes, Compose or Ray."""
