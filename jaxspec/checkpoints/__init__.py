"""Reads and writes models: file formats, presets, the Hugging Face Hub."""
