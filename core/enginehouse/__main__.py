"""The ``enginehouse`` command, also as ``python -m enginehouse``."""

from enginehouse.process import prepare_process


def main() -> None:
    """Run the command; the process is prepared before other imports."""
    prepare_process()
    from enginehouse.cli import main as command  # noqa: PLC0415 - slow import

    command(prog_name="enginehouse")


if __name__ == "__main__":
    main()
