"""Where names are defined, for type checkers; at run time they are imported when asked for."""

from wflmc import channel as channel
from wflmc import data as data
from wflmc import evaluation as evaluation
from wflmc import planning as planning
from wflmc import posterior as posterior
from wflmc import privacy as privacy
from wflmc import sampling as sampling
from wflmc.apps import adapters as adapters
from wflmc.apps import audit as audit
from wflmc.apps import baselines as baselines
from wflmc.apps.adapters.modules import from_equinox as from_equinox
from wflmc.apps.adapters.modules import from_flax as from_flax
from wflmc.apps.adapters.programs import from_numpyro as from_numpyro
from wflmc.apps.diagnosis import advise as advise
from wflmc.apps.tables.estimators import PrivateClassifier as PrivateClassifier
from wflmc.apps.tables.estimators import PrivateRegressor as PrivateRegressor
from wflmc.channel import Link as Link
from wflmc.evaluation import Moments as Moments
from wflmc.evaluation import evaluate as evaluate
from wflmc.evaluation import exact_w2_sq as exact_w2_sq
from wflmc.evaluation import noise_aware as noise_aware
from wflmc.planning import Plan as Plan
from wflmc.planning import Policy as Policy
from wflmc.planning import Sampler as Sampler
from wflmc.planning import plan as plan
from wflmc.planning import plan_many as plan_many
from wflmc.posterior import gaussian_regression as gaussian_regression
from wflmc.posterior import posterior_from as posterior_from
from wflmc.posterior import softmax_regression as softmax_regression
from wflmc.privacy import Privacy as Privacy
from wflmc.privacy.whitening import release_whitening as release_whitening
from wflmc.sampling import Trace as Trace
from wflmc.sampling import sample as sample
from wflmc.support.errors import InputError as InputError
from wflmc.support.errors import SamplingError as SamplingError
from wflmc.version import __version__ as __version__

__all__: list[str] = [
    "InputError",
    "Link",
    "Moments",
    "Plan",
    "Policy",
    "Privacy",
    "PrivateClassifier",
    "PrivateRegressor",
    "Sampler",
    "SamplingError",
    "Trace",
    "__version__",
    "advise",
    "channel",
    "evaluate",
    "exact_w2_sq",
    "from_equinox",
    "from_flax",
    "from_numpyro",
    "gaussian_regression",
    "noise_aware",
    "plan",
    "plan_many",
    "posterior_from",
    "release_whitening",
    "sample",
    "softmax_regression",
]
