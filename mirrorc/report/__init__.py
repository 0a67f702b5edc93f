"""Reports of a training step as one HTML file."""
