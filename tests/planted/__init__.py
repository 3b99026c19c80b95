"""Planted bugs: one-line mistakes put into a copy of the package, each of which the suite must catch."""
