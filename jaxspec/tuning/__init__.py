"""Measures how drafts are accepted and what rounds cost, and chooses the fastest tree and schedule."""
