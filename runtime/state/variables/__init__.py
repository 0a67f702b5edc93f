"""Where variables lie, and what the user wrote to them."""
