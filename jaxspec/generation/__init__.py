"""Generation from prompts: drafting settings, jobs, streams, outputs, and files of results."""
