"""Who may have how much of the server: rates, requests at once and memory, of each caller and of all together."""

from __future__ import annotations

from enginehouse.api.http.admission.gate import Admission, Ticket
from enginehouse.api.http.admission.memory import EVERYBODY, NOT_RECOGNISED, MemoryAccount, Reservation
from enginehouse.api.http.admission.rates import RateState

__all__ = ["EVERYBODY", "NOT_RECOGNISED", "Admission", "MemoryAccount", "RateState", "Reservation", "Ticket"]
