"""What the workers of a step agree on in each call."""
