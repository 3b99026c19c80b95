"""Parsing the words of a command line.

Must not know any command.
"""

import argparse
from typing import NoReturn

from kvkeep.errors import BadInput


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are BadInput, so that every kind of bad input ends the same way."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message} (`{self.prog} --help` lists what can be said)")


def count(text: str) -> int:
    """A whole number above 0."""
    return _integer(text, at_least=1)


def count_or_none(text: str) -> int:
    """A whole number, 0 for none."""
    return _integer(text, at_least=0)


def seed(text: str) -> int:
    """A whole number, 0 or more."""
    return _integer(text, at_least=0)


def rate(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not usable here: it must be a number above 0")
    return value


def _integer(text: str, at_least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = at_least - 1
    if value < at_least:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not usable here: it must be a whole number of at least {at_least}"
        )
    return value
