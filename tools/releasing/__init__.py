"""Makes releases: versions, tags, and the files that are published."""
