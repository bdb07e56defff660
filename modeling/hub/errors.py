"""What went wrong with the Hub, said so that a user knows which repository it was about and what to do."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import HfHubHTTPError, HTTPError, RepositoryNotFoundError

ANOTHER_TOKEN = "`hf auth login` stores another one; HF_TOKEN, and a token that is passed on, have precedence over it."
REFUSALS = {
    401: f"the Hub does not know the token, or needs one. {ANOTHER_TOKEN}",
    403: f"the token does not allow it. {ANOTHER_TOKEN}",
}
BROKEN_TOKEN = f"the token cannot be one: it contains a line break or the like. {ANOTHER_TOKEN}"
BROKEN_OFF = "the connection broke off"
NOTHING_LOADED = "Nothing of an unfinished file was kept; load again."


@contextmanager
def clear_errors(repository: str, done: str, afterwards: str, token=None) -> Iterator[None]:
    """
    Around requests to the Hub: errors whose own text names neither the repository nor a way out get one that does.

    Args:
        repository: Its name.
        done: What was to be done to it, such as "loaded".
        afterwards: How things are when the connection has broken off, and what to do.
        token: That the caller has passed on, if any.
    """
    # Before it is used: libraries log, token and all, that it cannot be sent.
    if isinstance(token, str) and not (token.isascii() and token.isprintable()):
        raise OSError(f"{repository} could not be {done}: {BROKEN_TOKEN}")
    handled = sys.exception()
    try:
        yield
    except (HTTPError, OSError, RuntimeError) as error:
        reason = find_reason(error, handled)
        if reason is None:
            raise
        text = f"{repository} could not be {done}: {reason}"
        if reason == BROKEN_TOKEN:
            # The error that this one replaces shows the token.
            raise OSError(text) from None
        if reason.startswith(BROKEN_OFF):
            raise ConnectionError(f"{text} {afterwards}") from error
        if not isinstance(error, HfHubHTTPError):
            raise OSError(text) from error
        # Its type and its response tell a program more than a new error would.
        error.append_to_message(f"\n{text}")
        raise


def find_reason(error: Exception, handled: BaseException | None = None) -> str | None:
    """
    What is behind an error; None where its own text says enough.

    Args:
        handled: An earlier error, in whose handling this one happened; it is no reason.
    """
    cause = error
    while cause not in (None, handled) and not isinstance(cause, HTTPError):
        cause = cause.__cause__ or cause.__context__
    if cause in (None, handled):
        return None
    response = getattr(cause, "response", None)
    if response is None:
        in_token = "Illegal header value" in str(cause)
        return BROKEN_TOKEN if in_token else f"{BROKEN_OFF} ({cause})."
    # Of missing repositories, revisions and files the errors themselves say which it is and what to do.
    if isinstance(cause, RepositoryNotFoundError) or response.status_code == 404:
        return None
    return REFUSALS.get(response.status_code) or (None if cause is error else str(cause))


__all__ = ["NOTHING_LOADED", "clear_errors"]
