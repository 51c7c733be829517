"""Grammars of requests, Lark and GBNF, in the library's Lark dialect."""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

__all__ = ["GrammarProblem", "lark_of_gbnf", "read_lark"]

# Strings, expressions and comments are skipped as the library reads them (an expression may span lines); what is left
# may hold a directive. One that is never closed, which the library refuses, is skipped as far as it reaches: it is
# looked at once only, so that the time stays proportional to the text.
_LARK = re.compile(
    r'"(?:\\.|[^"\\\n])*+(?:"i?)?|/(?!/)(?:\\[\s\S]|[^/\\])++(?:/[imslux]*)?|//[^\n]*|#[^\n]*'
    r"|(?P<directive>%\w+)|(?P<special><[^>\n]*+>?)|^[ \t]*+[?!]?\w++\[(?P<attributes>[^\]\n]*+)\]",
    re.MULTILINE,
)
_DIRECTIVES = {"%ignore", "%regex"}


class GrammarProblem(ValueError):
    """A grammar is malformed or uses what is not supported."""


def read_lark(text: str) -> str:
    """A Lark grammar, once it holds nothing that the library would treat otherwise than the request expects.

    Raises:
        GrammarProblem: it holds a schema, control tokens, or attributes that change sampling.
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
    """A GBNF grammar as Lark.

    Raises:
        GrammarProblem: it is malformed.
    """
    try:
        return gbnf_to_lark(text)
    except GbnfToLarkError as error:
        raise GrammarProblem(str(error)) from error
    except Exception as error:  # the converter raises whatever it meets
        raise GrammarProblem(f"the grammar could not be read: {error}") from error
