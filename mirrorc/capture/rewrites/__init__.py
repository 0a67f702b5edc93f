"""Rewrites of a traced graph into the form that passes take."""
