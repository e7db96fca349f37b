"""Measurements: speed, memory, operations and precision, and what this machine supports."""
