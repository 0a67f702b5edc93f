"""Devices at run time: their threads, events, memory and names."""
