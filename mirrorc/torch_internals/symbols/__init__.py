"""Symbolic sizes."""
