"""The interface of front ends, their guards, the fallback chain."""
