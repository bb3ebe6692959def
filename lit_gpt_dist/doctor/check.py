"""One finding of the doctor: a light, what was found, what to do. Knows nothing of how it is found or shown."""

from dataclasses import dataclass
from enum import Enum


class Light(Enum):
    GREEN = "green"
    YELLOW = "yellow"  # works, but slower or riskier than it could be
    RED = "red"  # will fail, or is failing
    UNKNOWN = "white"  # this machine gives no answer


@dataclass(frozen=True)
class Check:
    """``advice`` is empty where there is nothing to do."""

    name: str
    light: Light
    found: str
    advice: str = ""
