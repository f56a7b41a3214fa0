"""Record plans and draws of many settings, and compare two such records.

A change that moves walls must leave results as they are. Record them with the code
before the change and with the code after it, on the same machine, then compare:

    python scripts/same_results.py record before.npz
    python scripts/same_results.py record after.npz
    python scripts/same_results.py compare before.npz after.npz

`record` uses the `wflmc` that Python finds (PYTHONPATH=other/checkout/src chooses
another one) and only names that users rely on, so that one script serves both sides.
`compare` prints a line for every setting. Plans have to be bit-identical; draws have to
be bit-identical or within a relative 1e-5, which is said of the setting.
"""

import argparse
import inspect
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import wflmc
from wflmc import Policy, Privacy, Sampler
from wflmc.sampling import sample

Arrays = dict[str, np.ndarray]
Setting = Callable[[], Arrays]

TOLERANCE = 1e-5
"""The largest relative difference of draws."""
PLAN = "plan"
"""Prefix of arrays that have to be bit-identical."""
PLAN_FIELDS = (
    "step_size",
    "gain",
    "weight",
    "server_noise",
    "received",
    "threshold",
    "bound",
    "power_share",
    "limit",
    "objective",
    "lower_bound",
    "gamma",
    "clip",
    "example_clip",
    "noise_power",
    "initial_w2_sq",
    "ledger",
    "rounding",
    "downlink_noise",
    "loss",
    "spent",
)
ROUNDS = {"burn_in": 12, "samples": 10}
CHAINS = 5
DEVICES = 6


def plan_arrays(plan: wflmc.Plan) -> Arrays:
    """Return the numbers of a plan."""
    values = {name: getattr(plan, name) for name in PLAN_FIELDS}
    arrays = {name: np.asarray(v) for name, v in values.items() if v is not None}
    arrays["regime"] = np.asarray(str(plan.regime))
    arrays["digest"] = np.asarray(plan.digest)
    return {f"{PLAN}.{name}": array for name, array in arrays.items()}


def trace_arrays(trace: wflmc.Trace) -> Arrays:
    """Return the draws of a trace, and what else it has."""
    arrays = {
        "theta": np.asarray(trace.theta),
        "clip_rate": np.asarray(trace.clip_rate),
        "burn_in_clip_rate": np.asarray(trace.burn_in_clip_rate),
    }
    if trace.warmup is not None:
        arrays["warmup"] = np.asarray(trace.warmup)
    if trace.velocity is not None:
        arrays["velocity"] = np.asarray(trace.velocity)
    if trace.predictions is not None:
        arrays["probability"] = trace.predictions.probability
        arrays["variance"] = trace.predictions.variance
    if trace.transcript is not None:
        arrays["position"] = trace.transcript.position
        arrays["gradient"] = trace.transcript.gradient
        arrays["noise"] = trace.transcript.noise
    return arrays


def execution(**options: Any) -> dict[str, Any]:
    """Return the arguments of `sample` that say how chains are executed."""
    declared = inspect.signature(sample).parameters.get("execution")
    if declared is None or declared.kind is inspect.Parameter.VAR_KEYWORD:
        return options
    from wflmc.sampling import Execution

    return {"execution": Execution(**options)}


# Models.


def gaussian(**options: Any) -> Any:
    """Return a linear regression of 120 examples."""
    return wflmc.gaussian_regression(
        jax.random.key(3), devices=DEVICES, **{"examples": 120, **options}
    )


def softmax(**options: Any) -> Any:
    """Return a softmax regression of three classes."""
    return wflmc.softmax_regression(
        jax.random.key(4),
        devices=DEVICES,
        **{"examples": 150, "dim": 4, "classes": 3, **options},
    )


def examples(count: int = 90) -> dict[str, np.ndarray]:
    """Return examples of a logistic regression."""
    generator = np.random.default_rng(5)
    x = generator.normal(size=(count, 3))
    probability = 1 / (1 + np.exp(-x @ np.array([1.0, -1.0, 0.5])))
    y = (generator.random(count) < probability).astype(float)
    return {"x": x, "y": y}


def custom(**options: Any) -> Any:
    """Return a logistic regression as a custom model."""

    def log_likelihood(w: Any, example: Any) -> Any:
        logit = example["x"] @ w
        return example["y"] * logit - jnp.logaddexp(0.0, logit)

    def log_prior(w: Any) -> Any:
        return -0.5 * jnp.sum(w**2)

    known = {"mu": 1.0, "L": 30.0, "initial": np.zeros(3), "devices": 3}
    return wflmc.posterior_from(
        log_likelihood, log_prior, examples(), **{**known, **options}
    )


def numpyro_model() -> Any:
    """Return a hierarchical regression of NumPyro."""
    import numpyro
    import numpyro.distributions as dist

    def model(x: Any, y: Any = None) -> None:
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, scale), obs=y)

    data = examples(60)
    return wflmc.from_numpyro(model, data, devices=3)


def class_score(logits: Any, label: Any) -> Any:
    """Return the log-likelihood of a label."""
    return jax.nn.log_softmax(logits)[label]


def pairs(data: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and labels."""
    return data["x"], data["y"].astype(int)


def flax_model() -> Any:
    """Return a small network of Flax."""
    from flax import linen

    class Network(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return linen.Dense(2)(linen.tanh(linen.Dense(4)(x)))

    data = examples(60)
    return wflmc.from_flax(Network(), class_score, pairs(data), devices=3, L=200.0)


def equinox_model() -> Any:
    """Return a small network of Equinox."""
    import equinox

    network = equinox.nn.MLP(3, 2, 4, 1, key=jax.random.key(8))
    data = examples(60)
    return wflmc.from_equinox(network, class_score, pairs(data), devices=3, L=200.0)


# Links and promises.


def rayleigh(**options: Any) -> wflmc.Link:
    """Return an uplink with Rayleigh fading."""
    return wflmc.Link(wflmc.channel.rayleigh(power=0.05), **{"snr_db": 25.0, **options})


def static(**options: Any) -> wflmc.Link:
    """Return an uplink with constant gains."""
    return wflmc.Link(wflmc.channel.static(power=1e-2), **options)


BY_DEVICE = Privacy(epsilon=12.0, delta=0.01, clip=25.0)
BY_RECORD = Privacy(
    epsilon=12.0, delta=0.01, clip=25.0, unit="record", example_clip=3.0
)
ADD_REMOVE = Privacy(
    epsilon=12.0,
    delta=0.01,
    clip=25.0,
    unit="record",
    example_clip=3.0,
    adjacency="add-remove",
)
PAPER = Privacy(epsilon=12.0, delta=0.01, clip=25.0, accountant="paper")
UNEQUAL = Privacy(
    epsilon=np.linspace(6.0, 16.0, DEVICES),
    delta=0.01,
    clip=np.linspace(15.0, 30.0, DEVICES),
)


def run_setting(
    posterior: Callable[[], Any],
    link: wflmc.Link | None = None,
    privacy: Privacy | None = None,
    *,
    step: float = 0.4,
    options: dict[str, Any] | None = None,
    how: dict[str, Any] | None = None,
    **parts: Any,
) -> Setting:
    """Return a setting that plans and samples.

    Args:
        posterior: makes the model.
        link: the channels.
        privacy: the promise.
        step: the step size, times μ + L.
        options: more arguments of `plan`.
        how: more arguments of `sample`.
        **parts: `sampler` and `policy`.
    """

    def run() -> Arrays:
        model = posterior()
        arguments = {
            **ROUNDS,
            "step_size": step / (model.mu + model.L),
            **(options or {}),
        }
        plan = wflmc.plan(model, link, privacy, **arguments, **parts)
        arguments_of_sample = {"chains": CHAINS, **(how or {})}
        trace = sample(jax.random.key(9), model, plan, **arguments_of_sample)
        return {**plan_arrays(plan), **trace_arrays(trace)}

    return run


def several_plans() -> Arrays:
    """Sample one chain for each of several plans."""
    model = gaussian()
    step = 0.4 / (model.mu + model.L)
    links = [rayleigh(seed=seed) for seed in range(4)]
    plans = wflmc.plan_many(model, links, BY_DEVICE, step_size=step, **ROUNDS)
    trace = sample(jax.random.key(9), model, plans, numbers=[0, 0, 1, 1])
    arrays = trace_arrays(trace)
    for index, plan in enumerate(plans):
        for name, values in plan_arrays(plan).items():
            arrays[f"{name}.{index}"] = values
    return arrays


def continued_chain() -> Arrays:
    """Sample the rounds of a plan in two parts."""
    model = gaussian()
    sampler = Sampler(dynamics="kinetic", friction=2.0)
    plan = wflmc.plan(
        model,
        rayleigh(),
        BY_DEVICE,
        step_size=0.5 / model.L**0.5,
        **ROUNDS,
        sampler=sampler,
        policy=Policy(power="equal"),
    )
    rest = plan.from_round(15)
    trace = sample(jax.random.key(9), model, rest, 3, initial=np.ones((3, model.dim)))
    return {**plan_arrays(rest), **trace_arrays(trace)}


def with_ledger() -> Arrays:
    """Sample a plan and charge it to a ledger."""
    model = gaussian()
    step = 0.4 / (model.mu + model.L)
    spent = np.linspace(0.0, 0.1, DEVICES)
    plan = wflmc.plan(
        model, rayleigh(), BY_DEVICE, step_size=step, **ROUNDS, ledger=spent
    )
    book = wflmc.privacy.Ledger(BY_DEVICE, DEVICES)
    trace = sample(jax.random.key(9), model, plan, 1, ledger=book)
    return {**plan_arrays(plan), **trace_arrays(trace), "ledger_spent": book.spent}


def noise_aware() -> Arrays:
    """Infer a posterior from a transcript."""
    model = gaussian()
    step = 0.4 / (model.mu + model.L)
    policy = Policy(objective="transcript")
    plan = wflmc.plan(
        model, rayleigh(), BY_DEVICE, step_size=step, **ROUNDS, policy=policy
    )
    trace = sample(jax.random.key(9), model, plan, 2, transcript=True)
    result = wflmc.noise_aware(trace, model)
    return {
        **plan_arrays(plan),
        **trace_arrays(trace),
        "mean": np.asarray(result.mean),
        "covariance": np.asarray(result.covariance),
    }


def whitened() -> Arrays:
    """Sample after a paid-for release that whitens."""
    model = softmax(intercept=True)
    promise = Privacy(epsilon=40.0, delta=0.01, clip=25.0)
    release = wflmc.release_whitening(jax.random.key(2), model, rayleigh(), promise)
    moved = model.whitened(release.matrix)
    step = 0.4 / (moved.mu + moved.L)
    plan = wflmc.plan(
        moved, rayleigh(), promise, step_size=step, **ROUNDS, ledger=release.spent
    )
    trace = sample(jax.random.key(9), moved, plan, CHAINS)
    return {**plan_arrays(plan), **trace_arrays(trace), "matrix": release.matrix}


# Commands.


def command(*words: str) -> dict[str, Any]:
    """Run a command of wflmc with --json, and return what it prints."""
    call = [sys.executable, "-m", "wflmc", *words, "--json"]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


SCENARIO = """
[posterior]
devices = 4
examples = 80
[link]
snr_db = 25.0
[privacy]
epsilon = 15.0
delta = 0.01
[sampler]
burn_in = 12
samples = 10
chains = 2
"""


def command_setting(name: str, *overrides: str, words: tuple[str, ...] = ()) -> Setting:
    """Return a setting that runs a scenario by a command."""

    def run() -> Arrays:
        import h5netcdf

        with tempfile.TemporaryDirectory() as folder:
            scenario = Path(folder, "scenario.toml")
            scenario.write_text(SCENARIO)
            changes = [word for override in overrides for word in ("--set", override)]
            out = Path(folder, "out")
            summary = command(name, str(scenario), "--out", str(out), *changes, *words)
            plan = json.loads((out / "plan.json").read_text())
            with h5netcdf.File(out / "trace.nc") as file:
                theta = np.asarray(file["posterior/theta"][...])
        arrays = {
            f"{PLAN}.{key}": np.asarray(plan[key]) for key in ("gain", "step_size")
        }
        arrays[f"{PLAN}.spent"] = np.asarray(plan["privacy"]["spent"])
        arrays["theta"] = theta
        arrays["epsilon_spent"] = np.asarray(summary["epsilon_spent"])
        return arrays

    return run


def table(count: int = 400) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return features, labels and targets."""
    generator = np.random.default_rng(6)
    X = generator.normal(size=(count, 4))
    score = X @ np.array([1.0, -0.5, 0.2, 0.0]) + generator.normal(size=count)
    return X, (score > 0.3).astype(int), score


def fit_classifier(**options: Any) -> Setting:
    """Return a setting that fits a classifier with a seed."""

    def run() -> Arrays:
        X, labels, _ = table()
        model = wflmc.PrivateClassifier(
            epsilon=4.0, delta=1e-4, random_state=1, **options
        )
        model.fit(X, labels, devices=np.arange(len(X)) % 40)
        return {"probability": np.asarray(model.predict_proba(X))}

    return run


def fit_regressor(**options: Any) -> Setting:
    """Return a setting that fits a regressor with a seed."""

    def run() -> Arrays:
        X, _, target = table()
        model = wflmc.PrivateRegressor(
            epsilon=4.0, delta=1e-4, random_state=1, **options
        )
        model.fit(X, target)
        return {"prediction": np.asarray(model.predict(X))}

    return run


KINETIC = Sampler(dynamics="kinetic", friction=3.0)
KINETIC_STEP = 0.02
EQUAL = Policy(power="equal")


def settings() -> dict[str, Setting]:
    """Return every setting by its name."""
    found: dict[str, Setting] = {
        "gaussian device": run_setting(gaussian, rayleigh(), BY_DEVICE),
        "gaussian static": run_setting(gaussian, static(), BY_DEVICE),
        "gaussian record": run_setting(gaussian, rayleigh(), BY_RECORD),
        "gaussian add-remove": run_setting(gaussian, rayleigh(), ADD_REMOVE),
        "gaussian paper accountant": run_setting(gaussian, rayleigh(), PAPER),
        "gaussian unequal devices": run_setting(gaussian, rayleigh(), UNEQUAL),
        "gaussian no promise": run_setting(gaussian, rayleigh(), Privacy()),
        "gaussian defaults": run_setting(gaussian, options={"step_size": None}),
        "gaussian dirichlet": run_setting(
            lambda: gaussian(partition="dirichlet:0.5"), rayleigh(), BY_DEVICE
        ),
        "gaussian intercept": run_setting(
            lambda: gaussian(intercept=True), rayleigh(), BY_DEVICE
        ),
        "gaussian whitened": run_setting(
            lambda: gaussian(intercept=True).whitened(), rayleigh(), BY_DEVICE
        ),
        "gaussian whitened prior": run_setting(
            lambda: gaussian().whitened(prior_on="whitened"), rayleigh(), BY_RECORD
        ),
        "gaussian downlink": run_setting(
            gaussian, rayleigh(downlink_snr_db=20.0), BY_DEVICE
        ),
        "gaussian downlink record": run_setting(
            gaussian, rayleigh(downlink_snr_db=20.0), BY_RECORD
        ),
        "gaussian csi error": run_setting(gaussian, rayleigh(csi_error=0.2), BY_DEVICE),
        "gaussian unequal power": run_setting(
            gaussian, rayleigh(snr_db=np.linspace(15.0, 30.0, DEVICES)), BY_DEVICE
        ),
        "gaussian rician correlated": run_setting(
            gaussian,
            wflmc.Link(wflmc.channel.rician(0.05, 2.0, 0.7), snr_db=25.0),
            BY_DEVICE,
        ),
        "gaussian given gains": run_setting(
            gaussian,
            wflmc.Link(
                wflmc.channel.from_array(
                    np.linspace(0.1, 0.6, 22 * DEVICES).reshape(22, -1)
                ),
                snr_db=25.0,
            ),
            BY_DEVICE,
        ),
        "gaussian keep burn-in": run_setting(
            gaussian, rayleigh(), BY_DEVICE, how={"keep_burn_in": True}
        ),
        "gaussian transcript": run_setting(
            gaussian, rayleigh(), BY_DEVICE, how={"transcript": True}
        ),
        "gaussian chunks": run_setting(
            gaussian, rayleigh(), BY_DEVICE, how=execution(memory=600.0)
        ),
        "gaussian initial": run_setting(
            gaussian, rayleigh(), BY_DEVICE, how={"initial": np.full((CHAINS, 5), 0.5)}
        ),
        "gaussian numbers": run_setting(
            gaussian, rayleigh(), BY_DEVICE, how={"chains": 3, "numbers": [4, 7, 7]}
        ),
        "gaussian one chain": run_setting(
            gaussian, rayleigh(), BY_DEVICE, how={"chains": 1}
        ),
        "gaussian zero start": run_setting(
            gaussian, rayleigh(), BY_DEVICE, sampler=Sampler(init="zero")
        ),
        "gaussian later rounds": run_setting(
            gaussian, rayleigh(), BY_DEVICE, sampler=Sampler(start=7)
        ),
        "gaussian known start": run_setting(
            gaussian, rayleigh(), BY_DEVICE, options={"initial_w2_sq": 4.0}
        ),
        "gaussian planned steps": run_setting(
            gaussian, static(), BY_DEVICE, sampler=Sampler(step_schedule="planned")
        ),
        "gaussian steps by round": run_setting(
            gaussian,
            rayleigh(),
            BY_DEVICE,
            options={"step_size": np.linspace(2e-3, 1e-3, 22)},
        ),
        "softmax device": run_setting(softmax, rayleigh(), BY_DEVICE),
        "softmax record": run_setting(softmax, rayleigh(), BY_RECORD),
        "softmax add-remove": run_setting(softmax, rayleigh(), ADD_REMOVE),
        "softmax whitened": run_setting(
            lambda: softmax(intercept=True).whitened(), rayleigh(), BY_DEVICE
        ),
        "softmax whitened record": run_setting(
            lambda: softmax(intercept=True).whitened(), rayleigh(), BY_RECORD
        ),
        "softmax downlink": run_setting(
            softmax, rayleigh(downlink_snr_db=25.0), BY_DEVICE
        ),
        "softmax by label": run_setting(
            lambda: softmax(partition="by-label"), rayleigh(), BY_DEVICE
        ),
        "softmax predictions": run_setting(
            softmax, rayleigh(), BY_DEVICE, how={"predictions": np.eye(4)}
        ),
        "softmax transcript": run_setting(
            softmax, rayleigh(), BY_RECORD, how={"transcript": True}
        ),
        "softmax unclipped": run_setting(
            softmax, rayleigh(), Privacy(), policy=Policy(power="noiseless")
        ),
        "softmax release that whitens": whitened,
        "custom device": run_setting(custom, static(), BY_DEVICE),
        "custom record": run_setting(custom, static(), BY_RECORD),
        "custom batch": run_setting(lambda: custom(batch=5), static(), BY_DEVICE),
        "custom downlink": run_setting(custom, static(downlink_snr_db=25.0), BY_DEVICE),
        "custom laplace": run_setting(
            lambda: custom(preconditioner="laplace", mu=None, L=None),
            static(),
            BY_DEVICE,
        ),
        "custom kinetic": run_setting(
            custom,
            static(),
            BY_RECORD,
            options={"step_size": KINETIC_STEP},
            sampler=KINETIC,
            policy=EQUAL,
        ),
        "numpyro device": run_setting(numpyro_model, static(), BY_DEVICE),
        "numpyro record": run_setting(numpyro_model, static(), BY_RECORD),
        "flax": run_setting(flax_model, static(), BY_RECORD),
        "equinox": run_setting(
            equinox_model, static(), BY_DEVICE, options={"initial_w2_sq": 10.0}
        ),
        "several plans": several_plans,
        "continued chain": continued_chain,
        "ledger": with_ledger,
        "noise-aware": noise_aware,
        "fit classifier": fit_classifier(),
        "fit classifier by device": fit_classifier(
            unit="device", adjacency="add-remove"
        ),
        "fit regressor": fit_regressor(),
        "run command": command_setting("run"),
        "run command kinetic": command_setting(
            "run",
            "sampler.dynamics=kinetic",
            "sampler.step_size=0.02",
            "policy.power=equal",
        ),
        "run command softmax": command_setting(
            "run", "posterior.model=softmax", "posterior.preconditioner=whiten"
        ),
        "federation": command_setting("federate", words=("--runtime", "process")),
        "federation softmax record": command_setting(
            "federate",
            "posterior.model=softmax",
            "privacy.unit=record",
            "privacy.example_clip=3.0",
            words=("--runtime", "process"),
        ),
        "federation kinetic downlink": command_setting(
            "federate",
            "sampler.dynamics=kinetic",
            "sampler.step_size=0.02",
            "policy.power=equal",
            "link.downlink_snr_db=20",
            words=("--runtime", "process"),
        ),
    }
    for name, sampler, policy in policies():
        found[f"gaussian {name}"] = run_setting(
            gaussian,
            rayleigh(),
            BY_DEVICE,
            options={"step_size": KINETIC_STEP}
            if sampler.dynamics == "kinetic"
            else {},
            sampler=sampler,
            policy=policy,
        )
    return found


def policies() -> Iterator[tuple[str, Sampler, Policy]]:
    """Yield a name, a chain and a policy for each way of choosing power."""
    overdamped = Sampler()
    for power in ("equal", "no-dp", "noiseless-dp", "noiseless"):
        yield power, overdamped, Policy(power=power)
    yield "average", overdamped, Policy(objective="average")
    yield "exact", overdamped, Policy(objective="exact")
    yield "for transcripts", overdamped, Policy(objective="transcript")
    yield "all devices", overdamped, Policy(schedule="all")
    yield "unbiased", overdamped, Policy(schedule="unbiased", senders=3)
    yield "causal", overdamped, Policy(csi="causal")
    yield "printed bound", overdamped, Policy(bound="paper")
    yield "noise limit", overdamped, Policy(max_round_noise=50.0)
    yield "kinetic equal", KINETIC, EQUAL
    yield "kinetic exact", KINETIC, Policy(objective="exact")
    yield "kinetic noiseless", KINETIC, Policy(power="noiseless")


def record(path: Path, only: str) -> int:
    """Run all settings and store their arrays."""
    stored: Arrays = {}
    for name, setting in settings().items():
        if only in name:
            print(name, flush=True)
            for key, values in setting().items():
                stored[f"{name}/{key}"] = np.asarray(values)
    np.savez_compressed(path, **stored)
    return 0


def relative_difference(before: np.ndarray, after: np.ndarray) -> float:
    """Return the largest difference, over the largest size of an entry."""
    if before.shape != after.shape or before.dtype.kind != after.dtype.kind:
        return np.inf
    if before.dtype.kind not in "fiub":
        return 0.0 if np.array_equal(before, after) else np.inf
    same = (before == after) | (np.isnan(before) & np.isnan(after))
    if np.all(same):
        return 0.0
    old, new = before[~same].astype(float), after[~same].astype(float)
    if not np.all(np.isfinite(old) & np.isfinite(new)):
        return np.inf
    size = np.abs(before[np.isfinite(before)]).max()
    return float(np.abs(new - old).max() / size) if size > 0 else np.inf


def compare(before_path: Path, after_path: Path) -> int:
    """Print how far two records are apart; return 1 where they are too far."""
    before, after = np.load(before_path), np.load(after_path)
    keys = sorted({*before.files, *after.files})
    failed = 0
    names = list(dict.fromkeys(key.split("/")[0] for key in keys))
    for name in names:
        parts = [key for key in keys if key.startswith(f"{name}/")]
        verdict = _verdict(before, after, parts)
        failed += verdict.startswith("DIFFERENT")
        print(f"{name:34} {verdict}")
    print(f"{len(names)} settings, {failed} different")
    return int(failed > 0)


def _verdict(before: Any, after: Any, keys: list[str]) -> str:
    """Return what is said of one setting."""
    missing = [key for key in keys if key not in before.files or key not in after.files]
    if missing:
        return f"DIFFERENT: only one has {', '.join(missing)}"
    apart = {key: relative_difference(before[key], after[key]) for key in keys}
    largest = max(apart, key=lambda key: apart[key])
    if apart[largest] == 0:
        return "bit-identical"
    plans = [
        key for key in keys if key.split("/")[1].startswith(PLAN) and apart[key] > 0
    ]
    if plans:
        return f"DIFFERENT: {', '.join(plans)}"
    word = "within" if apart[largest] <= TOLERANCE else "DIFFERENT:"
    return f"{word} {apart[largest]:.1e} relative ({largest})"


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    recording = actions.add_parser("record", help="run all settings and store arrays")
    recording.add_argument("path", type=Path)
    recording.add_argument(
        "--only", default="", help="settings whose name has this text"
    )
    comparing = actions.add_parser("compare", help="compare two records")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.action == "record":
        return record(arguments.path, arguments.only)
    return compare(arguments.before, arguments.after)


if __name__ == "__main__":
    sys.exit(main())
