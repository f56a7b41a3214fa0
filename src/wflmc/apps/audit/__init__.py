"""Attacks on transcripts of the sampler, which bound ε from below.

The bound is compared with the ε that a plan claims, which is an upper bound.
"""

from wflmc.apps.audit.report import SCOPE, AuditReport, Finding
from wflmc.apps.audit.run import ATTACKS, audit, audit_model, audit_pair
from wflmc.apps.audit.target import above_cap

__all__ = [
    "ATTACKS",
    "SCOPE",
    "AuditReport",
    "Finding",
    "above_cap",
    "audit",
    "audit_model",
    "audit_pair",
]
