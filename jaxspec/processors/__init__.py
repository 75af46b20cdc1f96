"""Processors: penalties, forbidden words and minimum lengths; see `jaxspec.core.processor`."""
