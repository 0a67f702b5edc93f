"""From a call to a compiled program: lookup, driver, cache, progress."""
