"""Compares a step on several devices with one on the whole batch."""
