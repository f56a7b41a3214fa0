"""Who sends in each round and how strongly: the bound, thresholds, policies, and the Plan they make."""

from wflmc.planning.make import plan, plan_many
from wflmc.planning.plan import Plan
from wflmc.planning.policies import POLICIES, Policy, policy
from wflmc.planning.problem import Allocation, Problem
from wflmc.planning.proxy import Proxy

__all__ = ["POLICIES", "Allocation", "Plan", "Policy", "Problem", "Proxy", "plan", "plan_many", "policy"]
