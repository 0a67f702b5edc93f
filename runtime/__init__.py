"""Carries out lowered programs: one thread per device, and communicators that move the bytes."""
