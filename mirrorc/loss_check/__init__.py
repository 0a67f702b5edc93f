"""Compares a step on several devices with a step on one device with the whole batch."""
