"""The version of jaxspec."""

__version__ = "0.1.0"
