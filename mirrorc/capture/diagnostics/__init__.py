"""Errors, warnings and remarks of captures."""
