"""Front ends, their guards, and the fallback to the next front end."""
