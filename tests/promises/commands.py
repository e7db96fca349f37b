"""Commands as a user gives them, and what they leave."""

import csv

from parapos import cli


def words(changes):
    """Changes of a recipe as words of a command line."""
    return [word for key, value in changes.items() for word in (f"--{key}", str(value))]


def parapos(*argv):
    """A command in this process, which must do well."""
    assert cli.main([str(word) for word in argv]) == 0


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))
