"""What memory a step takes."""
