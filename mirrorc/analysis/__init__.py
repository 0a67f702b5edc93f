"""Analyses of graphs, without changes."""
