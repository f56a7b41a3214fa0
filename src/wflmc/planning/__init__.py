"""Who sends in each round and how strongly: the bound, thresholds, policies, and the Plan they make."""

from wflmc.planning.bound import Allocation, Problem
from wflmc.planning.build import plan, plan_many
from wflmc.planning.exact.proxy import Proxy
from wflmc.planning.plan import Plan
from wflmc.planning.policies import POLICIES, Policy, policy

__all__ = ["POLICIES", "Allocation", "Plan", "Policy", "Problem", "Proxy", "plan", "plan_many", "policy"]
