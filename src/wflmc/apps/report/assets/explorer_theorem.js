// Theorem 1: the plan for one kept sample over a static channel, all devices alike and all sending.

const REGIMES = ["lmc-limited", "power-limited", "dp-limited"];
const HEADROOM = 1e-12, FLOOR = 1e-12;

// Half the largest change of a device's gradient between neighbours, as of `wflmc.Privacy.half_change`.
function halfChange({ unit, adjacency, clip, example_clip: example }) {
  const share = adjacency === "replace" ? 1 : 0.5;
  return unit === "record" ? Math.min(clip, share * example) : share * clip;
}

// The three limits on a = α²/N0: Langevin noise, transmit power, and an equal share of the privacy budget.
function limits(state) {
  const amplitude = Math.sqrt(state.power);
  const sensitivity = halfChange(state);
  const budget = ACCOUNTANTS[state.accountant].budget(state.epsilon, state.delta);
  const affordable = budget / (2 * sensitivity ** 2);
  return {
    sensitivity, budget, affordable,
    lmc: state.step_size / 2,
    power: state.dim * 10 ** (state.snr_db / 10) / state.clip ** 2 * amplitude ** 2,
    share: affordable / state.rounds,
  };
}

// An index into REGIMES.
function regimeOf(lmc, power, share) {
  if (lmc <= Math.min(share, power)) return 0;
  return power <= Math.min(share, lmc) ? 1 : 2;
}

// γ, ρ and κ of Proposition 1.
function contraction(state) {
  const { mu, L, step_size: eta } = state;
  const distance = eta <= 2 / (mu + L) ? eta * mu : 2 - eta * L;
  const gamma = 1 - distance, kappa = 2 * (1 + gamma) / distance;
  return { gamma, rho: 1 - distance / 2, kappa, logRho: Math.log1p(-distance / 2), distance };
}

/* a[s] = min(cap, e^{u + rate·s}) with Σ a = budget, for budget < rounds·cap. With n rounds below the cap u has a
   closed form; the right n is the largest whose last round does not exceed the cap. */
function waterLevel(cap, budget, rate, rounds) {
  const logCap = Math.log(cap);
  let level = 0;
  for (let n = rounds; n >= 1; n--) {
    const left = budget - (rounds - n) * cap;
    level = Math.log(left) - rate * n - Math.log(Math.expm1(-rate * n) / Math.expm1(-rate));
    if (left > 0 && level + rate * n <= logCap) break;
  }
  return Array.from({ length: rounds }, (_, i) => Math.min(cap, Math.exp(Math.min(level + rate * (i + 1), logCap))));
}

const total = (values) => values.reduce((sum, value) => sum + value, 0);

function allocate(state, limit, logRho) {
  const cap = Math.min(limit.power, limit.lmc), { rounds } = state, budget = limit.affordable;
  if (rounds * cap <= budget) return new Array(rounds).fill(cap);
  const least = FLOOR * budget / rounds;
  const a = waterLevel(cap, budget, -logRho, rounds).map((value) => Math.max(value, least));
  const spent = total(a), most = budget * (1 - HEADROOM);
  return spent > most ? a.map((value) => value * (most / spent) * (1 - 1e-15)) : a;
}

// B[1..S] of Proposition 1, whole and in parts: what is left of the start, of discretisation, and of excess noise.
function bounds(state, a, { rho, kappa }) {
  const { step_size: eta, L, dim } = state;
  const error = eta ** 4 * L ** 3 * dim / 3 + eta ** 3 * L ** 2 * dim;
  const weight = state.bound === "corrected" ? dim : 1;
  const found = { bound: [], from_start: [], from_steps: [], from_noise: [] };
  let whole = state.initial_w2_sq, start = whole, steps = 0, noise = 0;
  for (const power of a) {
    const excess = Math.max(0, eta * eta / power - 2 * eta);
    whole = rho * rho * whole + kappa * (error + weight * excess);
    start *= rho * rho;
    steps = rho * rho * steps + kappa * error;
    noise = rho * rho * noise + kappa * weight * excess;
    found.bound.push(whole);
    found.from_start.push(start);
    found.from_steps.push(steps);
    found.from_noise.push(noise);
  }
  return { ...found, floor: kappa * error / (1 - rho * rho) };
}

// Rounds whose noise all clipped gradients together cannot undo, as `wflmc plan` warns of.
function loudRounds(state, a) {
  const { step_size: eta, dim } = state, reach = eta * state.devices * state.clip;
  return a.filter((power) => {
    const noise = Math.max(eta * eta / power, 2 * eta), spread = dim * noise;
    const beyond = noise > 1.05 * 2 * eta || spread / (2 * reach) > Math.sqrt(state.initial_w2_sq);
    return beyond && Math.sqrt(spread) > reach * (1 + 1e-9);
  }).length;
}

// Everything about one point: numbers, and arrays over the rounds.
function compute(state) {
  const limit = limits(state), constants = contraction(state);
  const a = allocate(state, limit, constants.logRho);
  const toGain = (power) => Math.sqrt(power * state.noise_power);
  const loss = a.map((power) => 2 * power * limit.sensitivity ** 2);
  const near = 1 - 1e-9;
  const atLimit = a.map((power) => (power >= near * limit.lmc ? 0 : power >= near * limit.power ? 1 : 2));
  const spent = total(loss), parts = bounds(state, a, constants);
  const equal = Math.min(limit.power, limit.lmc, limit.affordable * (1 - HEADROOM) / state.rounds);
  const byEqual = bounds(state, new Array(state.rounds).fill(equal), constants);
  return {
    ...parts,
    regime: REGIMES[regimeOf(limit.lmc, limit.power, limit.share)],
    regime_share: Object.fromEntries(REGIMES.map((name, i) => [name, total(atLimit.map((k) => k === i)) / a.length])),
    limit: atLimit,
    gamma: constants.gamma,
    budget: limit.budget,
    gain: a.map(toGain),
    loss_each: loss,
    loss: spent,
    epsilon_spent: ACCOUNTANTS[state.accountant].epsilon(spent, state.delta),
    objective: parts.bound[state.rounds - 1],
    equal_gain: toGain(equal),
    equal_bound: byEqual.bound,
    equal_objective: byEqual.bound[state.rounds - 1],
    lmc_cap: toGain(limit.lmc),
    power_cap: toGain(limit.power),
    dp_share: toGain(limit.share),
    spread: state.dim / state.mu,
    loss_cap: 2 * Math.min(limit.power, limit.lmc) * limit.sensitivity ** 2,
    loss_share: limit.budget / state.rounds,
    energy: state.devices * total(a) * state.noise_power * (state.clip / Math.sqrt(state.power)) ** 2,
    loud_rounds: loudRounds(state, a),
  };
}
