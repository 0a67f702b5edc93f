"""What can be found out about graphs without changing them."""
