"""Checks a program against rules after every pass."""
