"""Compares steps on several devices and on one."""
