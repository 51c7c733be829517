"""Converts the grammars of requests, Lark and GBNF, to the library's Lark dialect."""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

__all__ = ["GrammarProblem", "lark_of_gbnf", "read_lark"]

# Matches strings, expressions and comments as the library reads them (an expression may span lines); directives can
# only occur outside of them. An unclosed one, which the library refuses, is skipped up to where it would end: it is
# scanned only once, so the time stays linear in the length of the text.
_LARK = re.compile(
    r'"(?:\\.|[^"\\\n])*+(?:"i?)?|/(?!/)(?:\\[\s\S]|[^/\\])++(?:/[imslux]*)?|//[^\n]*|#[^\n]*'
    r"|(?P<directive>%\w+)|(?P<special><[^>\n]*+>?)|^[ \t]*+[?!]?\w++\[(?P<attributes>[^\]\n]*+)\]",
    re.MULTILINE,
)
_DIRECTIVES = {"%ignore", "%regex"}


class GrammarProblem(ValueError):
    """A grammar is malformed or uses an unsupported feature."""


def read_lark(text: str) -> str:
    """Return a Lark grammar after checking that the library treats all of it as the request expects.

    Raises:
        GrammarProblem: it contains a schema, control tokens, or attributes that change sampling.
    """
    for match in _LARK.finditer(text):
        directive, attributes = match["directive"], match["attributes"]
        if directive and directive not in _DIRECTIVES:
            hint = "; use a json_schema constraint" if directive == "%json" else ""
            raise GrammarProblem(f"the directive {directive[:60]} is not supported{hint}")
        if match["special"]:
            raise GrammarProblem(f"the token {match['special'][:60]} is not supported: grammars describe text")
        if attributes is not None and attributes.strip() != "lazy":
            raise GrammarProblem(f"the rule attributes [{attributes[:60]}] are not supported")
    return text


def lark_of_gbnf(text: str) -> str:
    """Convert a GBNF grammar to Lark.

    Raises:
        GrammarProblem: it is malformed.
    """
    try:
        return gbnf_to_lark(text)
    except GbnfToLarkError as error:
        raise GrammarProblem(str(error)) from error
    except Exception as error:  # the converter lets arbitrary exceptions through
        raise GrammarProblem(f"the grammar could not be read: {error}") from error
