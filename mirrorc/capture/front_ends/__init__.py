"""Front ends, their guards, and the fallback between them."""
