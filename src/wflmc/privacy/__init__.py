"""Budgets, accountants, what devices are promised, and the ledger of what they have spent."""

from wflmc.privacy.accountants import ACCOUNTANTS, Accountant, budget, delta_spent, epsilon_spent
from wflmc.privacy.ledger import ForeignLedgerError, Ledger, LedgerWarning, refuse_overspending
from wflmc.privacy.promise import ADJACENCIES, HIDDEN, UNITS, Privacy, round_loss

__all__ = [
    "ACCOUNTANTS",
    "ADJACENCIES",
    "HIDDEN",
    "UNITS",
    "Accountant",
    "ForeignLedgerError",
    "Ledger",
    "LedgerWarning",
    "Privacy",
    "budget",
    "delta_spent",
    "epsilon_spent",
    "refuse_overspending",
    "round_loss",
]
