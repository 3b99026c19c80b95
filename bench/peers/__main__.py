"""`python -m bench.peers ...`: the case, with its report in bench/results unless told otherwise or a smoke run.

Must not measure.
"""

import sys
from pathlib import Path

from kvkeep import cli

DEFAULT_JSON = Path(__file__).resolve().parent.parent / "results" / "peers.json"


def main(arguments: list[str]) -> int:
    """What `kvkeep bench peers` does."""
    plain = any(word.split("=")[0] in ("--json", "--smoke", "--quick", "-h", "--help") for word in arguments)
    return cli.main(["bench", "peers", *arguments, *([] if plain else ["--json", str(DEFAULT_JSON)])])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
