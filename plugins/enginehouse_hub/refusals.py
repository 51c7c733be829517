"""Maps a hub's HTTP status and ``X-Error-Code`` to an error that is meaningful to the user."""

from __future__ import annotations

from httpx2 import Response

from enginehouse.contract.errors import DownloadError
from enginehouse_hub.reference import HubReference

__all__ = ["HubUnreachable", "refusal"]

_MAX_RETRY_AFTER_S = 3600.0
_RETRYABLE = (408, 425, 429, 500, 502, 503, 504)


class HubUnreachable(DownloadError):
    """The hub did not answer, or is temporarily unavailable; ``retry_after_s`` is the delay that it asked for."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.retry_after_s = retry_after_s


def refusal(response: Response, reference: HubReference, endpoint: str, *, has_token: bool) -> DownloadError:
    """Return the error for a response other than 200."""
    if response.status_code in _RETRYABLE:
        message = f"{endpoint} answers {response.status_code} {response.reason_phrase}"
        return HubUnreachable(message, _retry_after_s(response))
    return DownloadError(_message(response, reference, endpoint, has_token))


def _message(response: Response, reference: HubReference, endpoint: str, has_token: bool) -> str:
    model, page = reference.model_id, f"{endpoint}/{reference.model_id}"
    match response.headers.get("X-Error-Code", ""), response.status_code:
        case "GatedRepo", _ if has_token:
            said = f"{model} is gated: the account of the token that was sent must accept its terms at {page}"
        case "GatedRepo", _:
            said = f"{model} is gated: accept its terms at {page}, and set HF_TOKEN to a token of that account"
        case "RevisionNotFound", _:
            said = f"{model} has no branch, tag or commit {reference.revision!r}"
        case ("RepoNotFound", _) | (_, 404):
            unseen = "or this token may not see it" if has_token else "or it is private and HF_TOKEN must be set"
            said = f"model {model!r} not found at {endpoint}, {unseen}"
        case _, 401 if has_token:
            said = f"{endpoint} refuses the token that was sent (HF_TOKEN, or the stored one)"
        case _, 401:
            said = f"{endpoint} does not show {model!r}: it does not exist, or HF_TOKEN must be set to see it"
        case _, 403:
            said = f"{model} may not be read with the token that was sent; see {page}"
        case _:
            said = f"{endpoint} answers {response.status_code} {response.reason_phrase}"
    return said


def _retry_after_s(response: Response) -> float:
    try:
        seconds = float(response.headers.get("Retry-After", 0))
    except ValueError:
        return 0.0
    return min(seconds, _MAX_RETRY_AFTER_S) if seconds > 0 else 0.0
