"""Models, files and programs that several tests share."""
