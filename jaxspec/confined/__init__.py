"""A process of limited time and memory, in which the programs that come with a checkpoint run."""
