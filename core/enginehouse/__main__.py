"""``python -m enginehouse``: the ``enginehouse`` command of this very Python."""

from enginehouse.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main(prog_name="enginehouse")
