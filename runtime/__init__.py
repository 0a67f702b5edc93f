"""Runs lowered programs, with a thread per device and communicators that move the bytes."""
