// A point in words: what limits it, what to beware of, and the scenario file that plans it.

const NAMES = { "lmc-limited": "LMC-limited", "power-limited": "power-limited", "dp-limited": "DP-limited" };

const shown = (value) => String(Number(value.toPrecision(4)));
// A double as TOML writes it.
const real = (value) => (/^-?\d+$/.test(String(value)) ? `${value}.0` : String(value));

// A share in per cent, never rounded to all or nothing.
function percent(share) {
  if (share > 0.999 && share < 1) return "more than 99.9 %";
  return share < 0.001 && share > 0 ? "less than 0.1 %" : `${Number((100 * share).toPrecision(3))} %`;
}

// How large the bound is, beside the posterior itself.
function scaleText({ objective, spread }) {
  const ratio = Number((objective / spread).toPrecision(2));
  return `${ratio === 1 ? "About" : `${ratio} times`} the posterior\u2019s own variance ` +
    `(m/μ = ${shown(spread)} at most): a bound, not the truth.`;
}

function againstEqual(ratio) {
  if (ratio < 1.01) return "but equal power does as well, to within 1 %. ";
  return `and equal power has a bound ${Number(ratio.toPrecision(3))} times as large. `;
}

const VERDICTS = {
  "lmc-limited": () =>
    "Power and privacy both force less noise than Langevin sampling needs anyway: they cost nothing, and the bound " +
    "is that of ideal devices. More power or a larger ε would change nothing.",
  "power-limited": (state, result) =>
    "Transmit power is the bottleneck in every round, and " +
    `${percent(Math.max(0, 1 - result.loss / result.budget))} of the privacy budget is left unspent. ` +
    "A higher SNR helps; a larger ε does not.",
  "dp-limited": (state, result) => {
    const held = Math.round(result.regime_share["dp-limited"] * state.rounds);
    const late = "The optimal plan transmits weakly early, where noise is still forgotten, and saves the budget for the end, " +
      againstEqual(result.equal_objective / result.objective);
    const help = result.regime_share["power-limited"] ? ", and so does a higher SNR." : "; a higher SNR does not.";
    return `The promise (ε, δ) (${state.adjacency}) holds power back in ${held} of ${state.rounds} rounds. ` +
      `${state.rounds > 1 ? late : ""}A larger ε helps${help}`;
  },
};

function cautions(state, result) {
  const found = [];
  if (result.loud_rounds) {
    found.push(
      `In ${result.loud_rounds} of ${state.rounds} rounds the noise exceeds what all clipped gradients together ` +
      "can undo (η\u00a0K\u00a0ℓ). The bound ignores clipping, and chains may be lost.",
    );
  }
  if (result.objective > 10 * state.initial_w2_sq) {
    found.push("The bound is far above the distance at the start, so it is of no use here.");
  }
  return found.join(" ");
}

// A scenario file that plans this point, with every double to its last digit.
function scenarioText(state, result) {
  const { devices, rounds, unit } = state;
  return [
    `# ${NAMES[result.regime]}, bound on W2² ${shown(result.objective)} after ${rounds} rounds (Theorem 1).`,
    "# The data are synthetic; mu, L and initial_w2_sq stand for those of your data.",
    "[posterior]", 'model = "gaussian"', `devices = ${devices}`, `dim = ${state.dim}`,
    ...(devices > 1200 ? [`examples = ${devices}`] : []),
    `mu = ${real(state.mu)}`, `L = ${real(state.L)}`, `initial_w2_sq = ${real(state.initial_w2_sq)}`,
    "", "[link]", 'fading = "static"', `power = ${real(state.power)}`, `snr_db = ${real(state.snr_db)}`,
    `noise_power = ${real(state.noise_power)}`,
    "", "[privacy]", `epsilon = ${real(state.epsilon)}`, `delta = ${real(state.delta)}`, `clip = ${real(state.clip)}`,
    ...(unit === "record" ? ['unit = "record"', `example_clip = ${real(state.example_clip)}`] : []),
    `adjacency = "${state.adjacency}"`, `accountant = "${state.accountant}"`,
    "", "[sampler]", `step_size = ${real(state.step_size)}`, `burn_in = ${rounds - 1}`, "samples = 1",
    "", "[policy]", 'power = "optimized"', 'schedule = "all"', `bound = "${state.bound}"`, "",
  ].join("\n");
}
