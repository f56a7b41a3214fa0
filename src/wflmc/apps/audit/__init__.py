"""Attacks on transcripts of the sampler: an empirical lower bound on ε, to hold against what a plan claims."""

from wflmc.apps.audit.attack import above_cap
from wflmc.apps.audit.run import (
    ATTACKS,
    SCOPE,
    AuditReport,
    Finding,
    audit,
    audit_model,
    audit_pair,
)

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
