"""An object with a state, as torch's `Stateful` has it, for tests of what saves and loads states.

held = Holder({"step": 3})
"""

from typing import Any


class Holder:
    """Keeps a state: one that an object has after it worked, or none before."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        """Return the state."""
        return self.state

    def load_state_dict(self, state: Any) -> None:
        """Take a state."""
        self.state = state
