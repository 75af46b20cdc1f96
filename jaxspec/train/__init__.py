"""Training draft heads against a frozen target: texts, the target's own answers, losses, the loop, checkpoints."""
