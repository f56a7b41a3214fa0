"""Privacy: budgets, accountants, the promise to devices, and the ledger of losses."""

from wflmc.privacy.accountants import ACCOUNTANTS, budget, delta_spent, epsilon_spent
from wflmc.privacy.ledger import Ledger
from wflmc.privacy.promise import ADJACENCIES, Privacy, round_loss

__all__ = [
    "ACCOUNTANTS",
    "ADJACENCIES",
    "Ledger",
    "Privacy",
    "budget",
    "delta_spent",
    "epsilon_spent",
    "round_loss",
]
