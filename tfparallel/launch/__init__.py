"""Starting the processes of a job on this machine: `tfparallel launch`."""
