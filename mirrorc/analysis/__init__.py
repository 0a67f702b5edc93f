"""Analyses that do not change graphs."""
