"""Paths, files and downloads. Every failure is a typed error that names the file."""
