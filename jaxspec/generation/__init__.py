"""Runs the decoder on prompts: what is drafted, a job, streams, outputs and result files."""
