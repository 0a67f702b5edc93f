"""Runs lowered programs, with one thread per device and with communicators that move the bytes."""
