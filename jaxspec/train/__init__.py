"""Training of draft heads for a target: texts, the target's own answers, losses, the loop, checkpoints, the card."""
