"""What is chosen by measurement."""
