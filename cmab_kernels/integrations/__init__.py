"""Adapters that run this package's operators in models of other packages, which are imported only when a function here is called."""
