"""A process with limits of time and memory, in which the programs that come with a checkpoint run."""
