"""Makes graphs and regions executable."""
