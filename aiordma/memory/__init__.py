"""Registered memory that is ours: page-aligned, never part of Python's own heap."""
