"""Reports of a run: read from a file, compared, drawn, and shown as a table, as a page, and in the README."""
