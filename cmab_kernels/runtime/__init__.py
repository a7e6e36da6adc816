"""The base of every operator set: checks, dtypes, the choice of an implementation, and the access to the extensions and
to Triton."""
