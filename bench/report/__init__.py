"""Reports of a run: read back, compared, drawn, and shown as a table, as a page, and in the README."""
