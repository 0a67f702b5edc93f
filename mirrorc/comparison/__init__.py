"""The differences of two programs: a unified diff of their texts."""
