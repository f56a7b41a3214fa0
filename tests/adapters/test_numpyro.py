"""NumPyro models: densities and draws against NumPyro itself, and one sentence for every model that cannot be split."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wflmc

from ..conftest import FULL

numpyro = pytest.importorskip("numpyro", reason="pip install numpyro")
dist = pytest.importorskip("numpyro.distributions")
RNG = np.random.default_rng(0)
N = 90
X, Y = RNG.normal(size=(N, 2)), RNG.normal(size=N)
KNOWN = {"mu": 1.0, "L": 100.0, "preconditioner": "none"}
IDEAL = {
    "link": wflmc.Link(wflmc.channel.static(), snr_db=150),
    "privacy": wflmc.Privacy(clip=1e5),
}


def flat(name):
    return numpyro.sample(name, dist.ImproperUniform(dist.constraints.real, (), ()))


def regression(X, y, size):
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
    level = numpyro.sample("level", dist.Normal(0, 2))
    sigma = numpyro.sample("sigma", dist.HalfCauchy(1))
    with numpyro.plate("records", size):
        mean = level + X @ weights[:2]
        numpyro.deterministic("fitted", mean)
        numpyro.sample("y", dist.StudentT(4, mean, sigma), obs=y)
    numpyro.deterministic("twice", 2 * sigma)


def schools(y, sigma):
    mean = numpyro.sample("mean", dist.Normal(0, 5))
    spread = numpyro.sample("spread", dist.HalfCauchy(5))
    with numpyro.plate("school", len(y)):
        effect = numpyro.sample("effect", dist.Normal(mean, spread))
        numpyro.sample("y", dist.Normal(effect, sigma), obs=y)


def rates(x, y):
    """Rates of examples whose laws depend on the examples."""
    slope = numpyro.sample("slope", dist.HalfNormal(1))
    with numpyro.plate("records", len(y)):
        rate = numpyro.sample("rate", dist.LogNormal(slope * x, 1))
        effect = numpyro.sample("effect", dist.Normal(rate, 1))
        numpyro.sample("y", dist.Normal(effect, 1), obs=y)


def mixture(y):
    mean = numpyro.sample("mean", dist.Normal(0, 3).expand([2]).to_event(1))
    probability = numpyro.sample("share", dist.Beta(2, 2))
    with numpyro.plate("records", y.shape[0]):
        kind = numpyro.sample(
            "kind", dist.Bernoulli(probability), infer={"enumerate": "parallel"}
        )
        numpyro.sample("y", dist.Normal(mean[kind], 1.0), obs=y)


SCHOOLS = {"y": RNG.normal(size=8), "sigma": np.full(8, 2.0)}
MODELS = {
    "regression": (regression, {"X": X, "y": Y, "size": N, "unused": 3}),
    "schools": (schools, SCHOOLS),
    "rates": (rates, {"x": X[:8, 0], "y": Y[:8]}),
}


@pytest.mark.parametrize("name", MODELS if FULL else ["rates"])
def test_density_and_gradient_are_those_of_numpyro(name):
    model, data = MODELS[name]
    posterior = wflmc.from_numpyro(model, data, devices=3, **KNOWN)
    theta = RNG.normal(size=(4, posterior.dim)).astype(np.float32)
    known = {key: value for key, value in data.items() if key != "unused"}

    @jax.jit
    def theirs(position):
        return jax.value_and_grad(
            lambda position: numpyro.infer.util.potential_energy(
                model, (), known, posterior.model.unflatten(position)
            )
        )(position)

    prior = jax.jit(posterior.model.prior_cost)
    for position, likelihood in zip(
        theta, posterior.log_likelihood(theta).sum(1), strict=True
    ):
        cost, slope = theirs(position)
        np.testing.assert_allclose(float(prior(position)) - likelihood, cost, rtol=1e-4)
        sums = jax.jit(type(posterior).gradients)(posterior, position).sum(0)
        np.testing.assert_allclose(sums, slope, rtol=2e-3, atol=2e-3)
    names = {
        "regression": {"weights", "level", "sigma", "twice"},
        "schools": {"mean", "spread", "effect"},
        "rates": {"slope", "rate", "effect"},
    }
    positive = {"regression": "sigma", "schools": "spread", "rates": "rate"}
    values = posterior.unflatten(theta)
    assert set(values) == names[name]
    assert np.all(values[positive[name]] > 0)


@pytest.mark.skipif(not FULL, reason="make test-full runs it")
def test_discrete_variables_of_an_example_are_summed_over():
    posterior = wflmc.from_numpyro(mixture, {"y": Y}, devices=2, **KNOWN)
    theta = np.array([[-1.0, 1.0, 0.4]], np.float32)
    probability = 1 / (1 + np.exp(-0.4))
    normal = np.exp(-0.5 * (Y[:, None] - np.array([-1.0, 1.0])) ** 2) / np.sqrt(
        2 * np.pi
    )
    by_hand = np.sort(np.log(normal @ [1 - probability, probability]))
    np.testing.assert_allclose(
        np.sort(posterior.log_likelihood(theta)[0]), by_hand, rtol=1e-5
    )


@pytest.mark.skipif(not FULL, reason="make test-full runs it")
def test_arviz_has_sites_plates_labels_and_predictions():
    labels = list("abcdefgh")
    posterior = wflmc.from_numpyro(
        schools, SCHOOLS, devices=3, coords={"school": labels}, **KNOWN
    )
    plan = wflmc.plan(
        posterior, **IDEAL, step_size=0.01, burn_in=2, samples=6, initial_w2_sq=1.0
    )
    trace = wflmc.sample(jax.random.key(0), posterior, plan, chains=2)
    groups = trace.to_arviz(posterior, predictive=True, log_likelihood=True)
    assert groups.posterior["effect"].dims == ("chain", "draw", "school")
    assert groups.posterior["school"].values.tolist() == labels
    assert (
        groups.posterior_predictive["y"].shape
        == groups.log_likelihood["y"].shape
        == (2, 6, 8)
    )
    np.testing.assert_allclose(
        np.sort(groups.observed_data["y"].values), np.sort(SCHOOLS["y"])
    )
    evaluation = wflmc.evaluate(
        trace, posterior, functions={"best": lambda site: jnp.max(site["effect"])}
    )
    assert evaluation.functions["best"].ess_min is not None


@pytest.mark.skipif(not FULL, reason="make test-full runs it")
def test_hidden_variables_of_an_example_may_depend_on_its_discrete_ones():
    def clusters(y):
        mean = numpyro.sample("mean", dist.Normal(0, 3).expand([2]).to_event(1))
        with numpyro.plate("records", y.shape[0]):
            kind = numpyro.sample(
                "kind", dist.Bernoulli(0.3), infer={"enumerate": "parallel"}
            )
            centre = numpyro.sample("centre", dist.Normal(mean[kind], 1.0))
            numpyro.sample("y", dist.Normal(centre, 1.0), obs=y)

    posterior = wflmc.from_numpyro(clusters, {"y": Y[:8]}, devices=2, **KNOWN)
    theta = RNG.normal(size=posterior.dim).astype(np.float32)
    mean, centre = (
        posterior.unflatten(theta)["mean"],
        posterior.unflatten(theta)["centre"],
    )

    def log_normal(away, scale=1.0):
        return -0.5 * (away / scale) ** 2 - np.log(scale * np.sqrt(2 * np.pi))

    log_joint = np.log([0.7, 0.3])[:, None] + log_normal(centre - mean[:, None])
    by_hand = (
        np.logaddexp(*log_joint).sum()
        + log_normal(Y[:8] - centre).sum()
        + log_normal(mean, 3.0).sum()
    )
    ours = posterior.log_likelihood(theta[None]).sum() - float(
        posterior.model.prior_cost(theta)
    )
    np.testing.assert_allclose(ours, by_hand, rtol=1e-5)


def test_arrays_of_other_lengths_may_be_used_in_both_precisions():
    def groups(group, y, predictor):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        with numpyro.plate("groups", len(predictor)):
            level = numpyro.sample("level", dist.Normal(slope * predictor, 1))
        numpyro.sample("y", dist.Normal(level[group], 1), obs=y)

    data = {"group": np.arange(N) % 3, "y": Y, "predictor": RNG.normal(size=3)}
    posterior = wflmc.from_numpyro(groups, data, devices=3, preconditioner="laplace")
    assert "predictor" in posterior.not_covered["arguments of the model"]
    assert wflmc.from_numpyro(groups, data, devices=3, **KNOWN).dim == posterior.dim


def prior_by_number(x, y):
    slope = numpyro.sample("slope", dist.Normal(0, len(y) ** -0.5))
    numpyro.sample("y", dist.Normal(slope * x, 1), obs=y)


def subsampled(x, y):
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    with numpyro.plate("records", N, subsample_size=9):
        numpyro.sample(
            "y", dist.Normal(slope, 1), obs=numpyro.subsample(y, event_dim=0)
        )


def by_control_flow(x, y):
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(slope * x if y[0] > 0 else 0.0 * x, 1), obs=y)


def growing(x, y):
    with numpyro.plate("records", len(y)):
        level = numpyro.sample("level", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(level, 1), obs=y)


def improper(x, y):
    numpyro.sample(
        "y", dist.Normal(flat("unidentified") + 0.5 * flat("other"), 1), obs=y
    )


def nan_gradient(x, y):
    root = numpyro.sample("root", dist.Normal(0, 1))
    numpyro.sample("outcome", dist.Normal(jnp.sqrt(jnp.abs(root)) + 0 * x, 1), obs=y)


def wrong_axis(x, y):
    level = numpyro.sample("level", dist.Normal(0, 1))
    with numpyro.plate("features", 2):
        numpyro.sample("y", dist.Normal(level, 1), obs=jnp.stack([y, y], -1))


def wrong_shape(x, y):
    with numpyro.plate("features", 3):
        numpyro.sample(
            "y",
            dist.Normal(x * numpyro.sample("slope", dist.Normal(0, 1)).sum(), 1),
            obs=y,
        )


def coupled(x, y):
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(slope * (x - x.mean()), 1), obs=y)


def scaled_by_a_parameter(x, y):
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    with numpyro.handlers.scale(scale=jnp.exp(slope)):
        numpyro.sample("y", dist.Normal(slope * x, 1), obs=y)


def discrete(x, y):
    numpyro.sample(
        "y", dist.Normal(numpyro.sample("kind", dist.Bernoulli(0.5)) * x, 1), obs=y
    )


BAD = {
    by_control_flow: ("y", "jnp.where"),
    growing: ("level", "keep"),
    improper: ("unidentified|other", "mode"),
    nan_gradient: ("outcome", "nan"),
    wrong_axis: ("y", "features"),
    wrong_shape: ("y|slope", ""),
    coupled: ("y", "own"),
    scaled_by_a_parameter: ("y", "numpyro.factor"),
    discrete: ("kind", "discrete"),
    prior_by_number: ("slope", "prior"),
    subsampled: ("records", "9 of 90"),
}
"""The site that the error of a model is about, and a word or number in it."""


QUICK = (
    by_control_flow,
    growing,
    improper,
    nan_gradient,
    wrong_axis,
    scaled_by_a_parameter,
)


@pytest.mark.parametrize(
    "model", BAD if FULL else QUICK, ids=lambda model: model.__name__
)
def test_bad_models_are_refused_in_one_sentence_that_names_the_site(model):
    sites, fact = BAD[model]
    with pytest.raises(wflmc.InputError) as caught:
        wflmc.from_numpyro(model, {"x": X[:, 0], "y": Y}, devices=3)
    assert caught.value.key in [f"site {site}" for site in sites.split("|")]
    assert fact in str(caught.value)
    assert str(caught.value).count(". ") == 0


@pytest.mark.skipif(not FULL, reason="make test-full runs it")
def test_shared_arrays_and_plan_by_default():
    def model(x, y, means):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(slope * (x - means[0]), 1), obs=y)

    data = {"x": X[:, 0], "y": Y, "means": np.full(N, X[:, 0].mean())}
    posterior = wflmc.from_numpyro(
        model, data, devices=3, shared=("means",), preconditioner="laplace"
    )
    centred = X[:, 0] - X[:, 0].mean()
    precision = 1 + centred @ centred
    np.testing.assert_allclose(
        posterior.coordinates.centre, centred @ Y / precision, rtol=1e-5
    )
    np.testing.assert_allclose(
        np.abs(posterior.coordinates.matrix), precision**-0.5, rtol=1e-5
    )
    plan = wflmc.plan(posterior, **IDEAL)
    assert plan.dynamics.name == "kinetic"
    assert len(plan.rounds) > 500
    private = wflmc.Privacy(
        epsilon=8, delta=1e-5, clip=30, unit="record", example_clip=0.2
    )
    plan = wflmc.plan(posterior, IDEAL["link"], private)
    assert plan.dynamics.name == "overdamped"
    assert plan.noise_ratio < 1.2


@pytest.mark.skipif(not FULL, reason="make test-full runs it")
def test_hierarchies_without_a_mode_agree_with_nuts():
    data = {
        "y": np.array([28.0, 8, -3, 7, -1, 1, 18, 12]),
        "sigma": np.array([15.0, 10, 16, 11, 9, 11, 10, 18]),
    }
    posterior = wflmc.from_numpyro(schools, data, devices=4)
    plan = wflmc.plan(posterior, **IDEAL)
    ours = posterior.unflatten(
        wflmc.sample(jax.random.key(1), posterior, plan, chains=100).theta
    )
    offsets = numpyro.handlers.reparam(
        schools, config={"effect": numpyro.infer.reparam.LocScaleReparam(0)}
    )
    nuts = numpyro.infer.MCMC(
        numpyro.infer.NUTS(offsets, target_accept_prob=0.95),
        num_warmup=1000,
        num_samples=8000,
        progress_bar=False,
    )
    nuts.run(jax.random.key(0), **data)
    for name, theirs in nuts.get_samples().items():
        a = ours[name].reshape(-1, *theirs.shape[1:])
        b = np.asarray(theirs)
        assert np.max(np.abs(a.mean(0) - b.mean(0)) / b.std(0)) < 0.1
        assert np.max(np.abs(a.std(0) / b.std(0) - 1)) < 0.08
