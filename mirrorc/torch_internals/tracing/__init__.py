"""Dynamo: tracing, guards, side effects, patches."""
