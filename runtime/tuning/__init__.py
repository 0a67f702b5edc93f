"""Chooses options by measurement."""
