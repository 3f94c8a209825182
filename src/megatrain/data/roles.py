"""What can be wrong with the order of roles, whatever the template makes of it.

Two turns of one speaker in a row are left to the template: some take them, and others refuse.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from megatrain.errors import UserError

INSTRUCTIONS = ("system", "developer")


def check_order(messages: Sequence[Mapping[str, Any]], place: str) -> None:
    """Instructions come first, what a tool gives after the assistant's call.

    Raises:
        UserError: naming the message.
    """
    before: str | None = None
    for number, message in enumerate(messages):
        role = message["role"]
        late = role in INSTRUCTIONS and before not in (None, *INSTRUCTIONS)
        uncalled = role == "tool" and before not in ("assistant", "tool")
        if late or uncalled:
            after = f"after the role '{before}'" if before else "at the beginning"
            wanted = "before all others" if late else "after the assistant's or another tool's"
            raise UserError(
                asked=f"chat messages at {place}",
                found=f"the role '{role}' {after} (message {number})",
                change=f"put messages of this role {wanted}",
            )
        before = role
