"""Platform specifics: compiler options, kernel thresholds, memory layouts, and the compilation cache."""
