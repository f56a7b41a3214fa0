"""Who sends in each round and how strongly: the bound, thresholds, policies, and the Plan they make."""

from wflmc.planning.bound import Allocation as Allocation
from wflmc.planning.bound import Problem as Problem
from wflmc.planning.build import plan as plan
from wflmc.planning.build import plan_many as plan_many
from wflmc.planning.exact import Proxy as Proxy
from wflmc.planning.options import Policy as Policy
from wflmc.planning.options import Sampler as Sampler
from wflmc.planning.plan import Plan as Plan
from wflmc.planning.policies import POLICIES as POLICIES
from wflmc.planning.policies import PowerPolicy as PowerPolicy
from wflmc.planning.policies import policy_named as policy_named
