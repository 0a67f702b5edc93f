"""Of gradients: factors, rows, which region makes them."""
