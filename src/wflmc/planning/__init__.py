"""Who sends in each round and how strongly: the bound, thresholds, policies, and the Plan they make."""

from wflmc.planning.plan import Plan, plan
from wflmc.planning.policies import POLICIES, Policy, policy
from wflmc.planning.problem import Allocation, Problem

__all__ = ["POLICIES", "Allocation", "Plan", "Policy", "Problem", "plan", "policy"]
