"""Front ends, their guards, the fallback chain."""
