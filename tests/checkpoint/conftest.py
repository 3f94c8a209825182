"""The workspace of the command line's tests."""

from tests.cli.conftest import workspace

__all__ = ["workspace"]
