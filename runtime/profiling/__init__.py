"""Profiles of a step."""
