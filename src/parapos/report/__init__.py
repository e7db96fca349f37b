"""Measurements and their presentation: precision, speed, what runs on this machine."""
