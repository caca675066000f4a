"""Functions of the rows of a training step on a CPU, in one pass over memory each."""
