"""Who does the work of a data stage: this process, worker processes, or the tasks of a cluster."""
