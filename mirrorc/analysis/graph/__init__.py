"""Aliases, layouts, lifetimes and cuts of any graph."""
