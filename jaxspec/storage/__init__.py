"""Paths, files and downloads; every failure is a typed error that names the file."""
