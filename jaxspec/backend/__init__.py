"""Differences between platforms: compiler options, memory layouts, and the compilation cache."""
