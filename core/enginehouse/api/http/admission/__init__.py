"""Admission control: rate, concurrency and memory limits, per caller and for the whole server."""

from __future__ import annotations

from enginehouse.api.http.admission.gate import Admission, Ticket
from enginehouse.api.http.admission.memory import EVERYBODY, NOT_RECOGNISED, MemoryAccount, Reservation
from enginehouse.api.http.admission.rates import RateState

__all__ = ["EVERYBODY", "NOT_RECOGNISED", "Admission", "MemoryAccount", "RateState", "Reservation", "Ticket"]
