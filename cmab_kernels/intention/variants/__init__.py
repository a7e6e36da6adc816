"""Estimators in closed form, all of them w = Sigma^-1 X'y with a Sigma and a y of their own."""
