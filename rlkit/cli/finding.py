"""One line of what `rlkit doctor` reports."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "warning", "broken"]


@dataclass(frozen=True)
class Finding:
    """What was looked at, what was found, and what to do about it."""

    name: str
    found: str
    state: State = "ok"
    """"note" is missing but not needed, "warning" will hurt sooner or later, "broken" stops rlkit from working."""
    advice: str = ""
    """What to do about it; "" when nothing needs doing."""
