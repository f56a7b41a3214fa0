"""Who transmits in each round, and how strongly.

The bound, thresholds, policies, and the `Plan` that they make.
"""

from wflmc.planning.bound import Allocation, Problem
from wflmc.planning.build import plan, plan_from, plan_many
from wflmc.planning.exact import Proxy
from wflmc.planning.options import PlanRequest, Policy, Sampler
from wflmc.planning.plan import Plan, Rounds
from wflmc.planning.policies import POLICIES, PowerPolicy, policy_named

__all__ = [
    "POLICIES",
    "Allocation",
    "Plan",
    "PlanRequest",
    "Policy",
    "PowerPolicy",
    "Problem",
    "Proxy",
    "Rounds",
    "Sampler",
    "plan",
    "plan_from",
    "plan_many",
    "policy_named",
]
