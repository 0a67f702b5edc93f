"""Checks a program after every pass, by rules."""
