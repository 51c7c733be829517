"""Who may have how much of the server: rates per minute and requests at once, of each caller and of all together."""

from __future__ import annotations

from enginehouse.admission.gate import Admission, Ticket
from enginehouse.admission.rates import RateState

__all__ = ["Admission", "RateState", "Ticket"]
