"""Devices at run time: their threads, their events, their memory, their names."""
