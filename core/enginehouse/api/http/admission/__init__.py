"""Admission control: rate, concurrency and memory limits, per caller and for the whole server."""

from __future__ import annotations

from enginehouse.api.http.admission.gate import Admission, RateState, Ticket
from enginehouse.api.http.admission.memory import EVERYBODY, NOT_RECOGNISED, MemoryAccount, Reservation

__all__ = ["EVERYBODY", "NOT_RECOGNISED", "Admission", "MemoryAccount", "RateState", "Reservation", "Ticket"]
