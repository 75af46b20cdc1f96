"""Scores texts, and runs the tasks of EleutherAI's lm-evaluation-harness."""
