"""What only developers run, from the root of the repository: python -m tools.NAME. Not part of the wheel."""
