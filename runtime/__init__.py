"""Runs lowered programs: a thread per device, and communicators between devices."""
