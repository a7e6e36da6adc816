"""`make reproduce`: every system and its closest baseline on the same data, side by side, and whether the published
claims hold."""
