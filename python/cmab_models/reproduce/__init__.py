"""`make reproduce`: every system and its closest baseline on the same data, side by side, and what became of the
published claims."""
