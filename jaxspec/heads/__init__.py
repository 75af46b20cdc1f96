"""Draft heads: networks, files, layouts of other projects, and the heads that are shipped."""
