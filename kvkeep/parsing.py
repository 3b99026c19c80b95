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
