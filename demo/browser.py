"""What comes from the browser and what goes to it: checked requests, answers that are sentences, arrays as text."""

import base64
import logging
from collections.abc import Callable, Iterable

import numpy as np

BROKEN = "This did not work, and not by your doing. The page's own log says why."


def whole_number(name: str, given, low: int, high: int) -> int:
    """A number of a request, or an error that says what is allowed."""
    is_whole = isinstance(given, int | float) and not isinstance(given, bool) and given == given // 1
    if not is_whole or not low <= given <= high:
        raise ValueError(f"{name} is {given!r}; it must be a whole number from {low:,} to {high:,}.")
    return int(given)


def one_of(name: str, given, allowed: Iterable[str]) -> str:
    if not isinstance(given, str) or given not in allowed:
        raise ValueError(f"{name} is {given!r}; it must be one of {', '.join(allowed)}.")
    return given


def in_sentences(answer: Callable[..., dict]) -> Callable[[dict], dict]:
    """
    An answer to a request, a dict of named arguments. What is wrong with the request becomes a sentence under `error`;
    so does anything else that fails, whose trace is for the log and not for the visitor.
    """

    def answered(request) -> dict:
        try:
            if not isinstance(request, dict):
                raise ValueError(f"A request is {request!r}; it must be a dict of named arguments.")
            return answer(**{str(name): value for name, value in request.items()})
        except ValueError as error:
            return {"error": str(error)}
        except Exception:
            logging.getLogger(__name__).exception("%s failed", answer.__name__)
            return {"error": BROKEN}

    # The name by which the browser calls it; the signature stays that of one request.
    answered.__name__ = answer.__name__
    return answered


def as_bytes(array: np.ndarray, low: float = 0.0, high: float = 255.0) -> str:
    """Numbers from low to high as bytes from 0 to 255, in base64: far shorter than lists of numbers."""
    scaled = np.rint((np.asarray(array, dtype=np.float64) - low) * (255 / (high - low)))
    return base64.b64encode(scaled.clip(0, 255).astype(np.uint8).tobytes()).decode()
