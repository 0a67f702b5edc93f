"""Devices at run time: threads, events, memory."""
