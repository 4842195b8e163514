"""``headtilt`` and ``python -m headtilt``: the command line, or one line on how to install it."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; without typer and rich, say what to install."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError:
        sys.stderr.write("headtilt's command line needs typer and rich: pip install 'headtilt[cli]'\n")
        sys.exit(2)
    try:
        from headtilt.cli import app

        app(prog_name="headtilt")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
