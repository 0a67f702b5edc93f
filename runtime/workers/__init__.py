"""Collectives, votes and failures of the workers that train together."""
