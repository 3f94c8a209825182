"""The one error that a user's mistake becomes.

Promise: every message says what was asked, what was found and what to change, and is raised
before anything large is allocated.  The command line prints it without a traceback.
"""

from functools import partial
from typing import Any


class UserError(ValueError):
    """A mistake that the user can mend.

    Args:
        asked: what the user asked for.
        found: what was found instead.
        change: what to change.
    """

    def __init__(self, *, asked: str, found: str, change: str) -> None:
        self.asked, self.found, self.change = asked, found, change
        super().__init__(f"{asked}: {found}. {change}.")

    def __reduce__(self) -> tuple[Any, ...]:
        """As what a process hands to another: exceptions are made again of positions, else."""
        return partial(UserError, asked=self.asked, found=self.found, change=self.change), ()


class NoRoomError(UserError):
    """What was asked for needs more memory than there is; smaller micro-batches may fit."""
