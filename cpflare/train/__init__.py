"""Training: losses, optimiser, loop, checkpoints, and the files of a run."""
