"""String formats as regular expressions, in the library's dialect, matching whole texts.

Each expression matches texts that every validator accepts: dates exist in the calendar, times have no
leap seconds, host names stay below their maximum length. They match fewer texts than the standard allows, never more.
"""

from __future__ import annotations

__all__ = ["FOREIGN_TEXTS", "STRING_FORMATS"]

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"  # excludes 0000
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_MONTH_AND_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_MONTH_AND_DAY}|{_LEAP_YEAR}-02-29)"
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_CLOCK}:[0-5][0-9](?:\\.[0-9]{{1,6}})?(?:Z|[+-]{_CLOCK})"

_COUNT = "(?:0|[1-9][0-9]{0,5})"
_OF_DAY = f"T(?:{_COUNT}H(?:{_COUNT}M(?:{_COUNT}S)?)?|{_COUNT}M(?:{_COUNT}S)?|{_COUNT}S)"
_OF_YEAR = f"(?:{_COUNT}Y(?:{_COUNT}M(?:{_COUNT}D)?)?|{_COUNT}M(?:{_COUNT}D)?|{_COUNT}D)"
_DURATION = f"P(?:{_OF_YEAR}(?:{_OF_DAY})?|{_OF_DAY}|{_COUNT}W)"

_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,48}[A-Za-z0-9])?"
_TOP_LABEL = "[A-Za-z](?:[A-Za-z0-9-]{0,48}[A-Za-z0-9])?"
_HOSTNAME = f"(?:{_LABEL}\\.){{0,3}}{_TOP_LABEL}"
_WORD = "[A-Za-z0-9_+-]{1,20}"
_EMAIL = f"{_WORD}(?:\\.{_WORD}){{0,2}}@(?:{_LABEL}\\.){{1,3}}[A-Za-z]{{2,24}}"

_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = f"{_BYTE}(?:\\.{_BYTE}){{3}}"
_GROUP = "[0-9a-fA-F]{1,4}"
_HEX = "[0-9a-fA-F]"


def _groups(count: int) -> str:
    """Expression for groups of an IPv6 address, joined by colons."""
    return f"{_GROUP}(?::{_GROUP}){{{count - 1}}}" if count else ""


# "::" replaces at least one group.
_IPV6 = "(?:{})".format(
    "|".join([_groups(8), *(f"{_groups(left)}::{_groups(right)}" for left in range(7) for right in range(7 - left))])
)

_PATH_CHAR = f"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%{_HEX}{{2}})"
_QUERY = f"(?:\\?(?:{_PATH_CHAR}|[/?])*)?(?:#(?:{_PATH_CHAR}|[/?])*)?"
_AUTHORITY = f"(?:{_HOSTNAME}|{_IPV4})(?::[1-9][0-9]{{0,3}})?"
_SCHEME = "[A-Za-z][A-Za-z0-9+.-]{0,20}"
_URI = f"{_SCHEME}:(?://{_AUTHORITY}(?:/{_PATH_CHAR}*)*|{_PATH_CHAR}+(?:/{_PATH_CHAR}*)*){_QUERY}"

_BASE64 = "[A-Za-z0-9+/]"
_QUANTIFIED = "(?:[A-Za-z0-9_ ]|\\.|\\\\[dws.]|\\[(?:a-z|A-Z|0-9|_){1,4}\\])(?:[*+?]|\\{[1-9]\\})?"

STRING_FORMATS: dict[str, str] = {
    "byte": f"(?:{_BASE64}{{4}})*(?:{_BASE64}[AQgw]==|{_BASE64}{{2}}[AEIMQUYcgkosw048]=)?",
    "date": _DATE,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "email": _EMAIL,
    "hostname": _HOSTNAME,
    "idn-email": _EMAIL,
    "idn-hostname": "(?:[a-z0-9]{1,40}\\.){0,3}[a-z]{1,24}",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "iri": _URI,
    "iri-reference": _URI,
    "json-pointer": "(?:/(?:[^~/]|~[01])*)*",
    "regex": f"\\^?(?:{_QUANTIFIED})*\\$?",
    "relative-json-pointer": "(?:0|[1-9]{1,3}0?)(?:#|(?:/(?:[^~/]|~[01])*)*)",
    "time": _TIME,
    "uri": _URI,
    "uri-reference": _URI,
    "uri-template": f"(?:/(?:{_PATH_CHAR}|\\{{[A-Za-z][A-Za-z0-9_]{{0,20}}\\}})+)+",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
}
"""Expression of each format name. Other formats have no effect."""

FOREIGN_TEXTS: dict[str, str] = {
    "date": "^$|[^-0-9W]",
    "date-time": "^[^:]*$|[^-+0-9:.,tTzZ_ ]",
    "duration": "^[^Pp]*$",
    "email": "^[^@]*$",
    "hostname": "^$|[ -,/:-@\\[-^`{-~]",
    "idn-email": "^[^@]*$",
    "idn-hostname": "^$|[ -,/:-@\\[-^`{-~]",
    "ipv4": "^[^.]*$|[^0-9.]",
    "ipv6": "^[^:]*$",
    "iri": "^[^:]*$",
    "iri-reference": '[ "<>\\\\^`{|}]',
    "json-pointer": "^[^/#]",
    "regex": "^[*+?]",
    "relative-json-pointer": "^$|^[^0-9]",
    "time": "^[^:]*$|[^-+0-9:.,zZ]",
    "uri": "^[^:]*$",
    "uri-reference": '[ "<>\\\\^`{|}]',
    "uri-template": "[{][^}]*$",
    "uuid": "^[^-]*$|[^-0-9A-Fa-f]",
}
"""Pattern of JSON Schema for texts that no validator takes for the format: fewer than those that are not of it. Without
``byte``, on which validators differ altogether.
"""
