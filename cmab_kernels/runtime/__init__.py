"""What every operator set runs on: checks, dtypes, the choice of an implementation, and the ways to the extensions and
to Triton."""
