"""The one error that a user's mistake becomes.

Promise: every message says what was asked, what was found and what to change, and is raised
before anything large is allocated.  The command line prints it without a traceback.
"""


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
