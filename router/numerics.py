"""What it means for a text that verifiers round logits in different ways. Pure.

A verifier's numerics are a name: those of one name give the same logits to the bit. "" = not known.
"""

from __future__ import annotations


def news(before: str, here: str) -> str:
    """Returns the numerics `here`, if they are not those of the text `before`; "" = there is no news."""
    return here if here != before else ""


def missing(numerics: str, same_numerics: bool) -> str:
    """Returns why a text with such numerics may wait although its model is served, to follow another
    sentence; "" if it need not."""
    if not (numerics and same_numerics):
        return ""
    return (
        f"; its text began with the numerics {numerics}, and --same-numerics lets it go on with no others, "
        "which no target worker has now"
    )
