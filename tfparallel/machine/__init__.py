"""What a machine is and lacks, before a job runs on it. Nothing here needs TensorFlow to work."""
