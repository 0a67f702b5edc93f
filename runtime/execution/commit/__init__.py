"""Commit of a step: the barrier of its replicas, finite checks, updates deferred behind it."""
