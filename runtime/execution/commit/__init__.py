"""Commit of a step: barrier, finite checks, and updates deferred behind it."""
