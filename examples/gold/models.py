"""Ten posteriors of posteriordb as NumPyro models, each a function of the data's names."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints


def flat(name, size=None, support=constraints.real):
    """A parameter with a flat prior."""
    return numpyro.sample(
        name, dist.ImproperUniform(support, () if size is None else (size,), ())
    )


def regression(features, target, sigma):
    """target ~ Normal(features · beta, sigma) with a flat prior on beta."""
    beta = flat("beta", features.shape[-1])
    with numpyro.plate("records", features.shape[0]):
        numpyro.sample("y", dist.Normal(features @ beta, sigma), obs=target)


def columns(*values):
    """Columns of a design matrix, numbers repeated as often as the last one is long."""
    return jnp.stack(
        [jnp.broadcast_to(value, values[-1].shape) * 1.0 for value in values], -1
    )


def logearn_height(earn, height):
    regression(
        columns(1.0, height), jnp.log(earn), flat("sigma", support=constraints.positive)
    )


def logearn_interaction(earn, height, male):
    features = columns(1.0, height, male, height * male)
    regression(features, jnp.log(earn), flat("sigma", support=constraints.positive))


def eight_schools_noncentered(J, y, sigma):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("school", J):
        offset = numpyro.sample("theta_trans", dist.Normal(0, 1))
        theta = numpyro.deterministic("theta", mu + tau * offset)
        numpyro.sample("effect", dist.Normal(theta, sigma), obs=y)


def kidscore_momiq(kid_score, mom_iq):
    regression(
        columns(1.0, mom_iq), kid_score, numpyro.sample("sigma", dist.HalfCauchy(2.5))
    )


def kidscore_interaction(kid_score, mom_hs, mom_iq):
    features = columns(1.0, mom_hs, mom_iq, mom_hs * mom_iq)
    regression(features, kid_score, numpyro.sample("sigma", dist.HalfCauchy(2.5)))


def low_dim_gauss_mix(y):
    mu = numpyro.sample(
        "mu", dist.ImproperUniform(constraints.ordered_vector, (), (2,))
    )
    numpyro.factor("mu_prior", dist.Normal(0, 2).log_prob(mu).sum())
    sigma = numpyro.sample("sigma", dist.HalfNormal(2).expand([2]).to_event(1))
    theta = numpyro.sample("theta", dist.Beta(5, 5))
    mixture = dist.MixtureSameFamily(
        dist.Categorical(probs=jnp.stack([theta, 1 - theta])), dist.Normal(mu, sigma)
    )
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", mixture, obs=y)


def logmesquite_logvas(
    weight, diam1, diam2, canopy_height, total_height, density, group
):
    volume, area, shape = diam1 * diam2 * canopy_height, diam1 * diam2, diam1 / diam2
    features = columns(
        1.0, *map(jnp.log, (volume, area, shape, total_height, density)), group
    )
    regression(features, jnp.log(weight), flat("sigma", support=constraints.positive))


def nes(partyid7, real_ideo, race_adj, age_discrete, educ1, gender, income):
    ages = [age_discrete == age for age in (2, 3, 4)]
    features = columns(1.0, real_ideo, race_adj, *ages, educ1, gender, income)
    regression(features, partyid7, flat("sigma", support=constraints.positive))


def blr(X, y, D):
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([D]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(10))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ beta, sigma), obs=y)
