"""`make reproduce`: trains every system and its closest baseline on the same data, and judges the published claims."""
