// Privacy budgets in doubles: the same relations between loss, ε and δ as `wflmc.privacy.accountants`.

const STEP = 0.5;
const NODES = Array.from({ length: 14 }, (_, n) => ((n + 0.5) * STEP) ** 2);
const WEIGHTS = NODES.map((square) => Math.exp(-square));

/* e^{x²} erfc(x) for x ≥ 0, to some 1e-15. It is (x/π) ∫ e^{−t²}/(x² + t²) dt. The midpoint rule with step h is wrong
   by e^{−π²/h²} once the pole at t = ix is accounted for, which adds 2e^{x²}/(1 + e^{2πx/h}) where x < π/h. All terms
   are positive: nothing cancels, near zero or in the tail. */
function erfcx(x) {
  const square = x * x;
  let sum = 0;
  for (let n = NODES.length - 1; n >= 0; n--) sum += WEIGHTS[n] / (square + NODES[n]);
  const pole = x < Math.PI / STEP ? 2 * Math.exp(square) / (1 + Math.exp(2 * Math.PI * x / STEP)) : 0;
  return 2 * STEP * x / Math.PI * sum + pole;
}

// erf(x) for x ≥ 0; below 1 by a series of positive terms, e^{−x²} Σ 2^n x^{2n+1}/(2n+1)!!.
function erf(x) {
  if (x >= 1) return 1 - Math.exp(-x * x) * erfcx(x);
  let term = x, sum = x;
  for (let n = 1; term > 1e-17 * sum; n++) sum += term *= 2 * x * x / (2 * n + 1);
  return 2 / Math.sqrt(Math.PI) * Math.exp(-x * x) * sum;
}

// log Φ(z).
function logNormalCdf(z) {
  const scaled = erfcx(Math.abs(z) * Math.SQRT1_2) / 2;
  return z < 0 ? Math.log(scaled) - z * z / 2 : Math.log1p(-scaled * Math.exp(-z * z / 2));
}

// log δ(ε) of a μ-GDP mechanism, log[Φ(a) − e^ε Φ(b)].
function logDelta(epsilon, mu) {
  const a = -epsilon / mu + mu / 2, b = -epsilon / mu - mu / 2;
  if (a >= 0) {
    const body = logNormalCdf(a);
    return body + Math.log1p(-Math.exp(Math.min(epsilon + logNormalCdf(b) - body, 0)));
  }
  const u = -a * Math.SQRT1_2, v = -b * Math.SQRT1_2, gap = mu * Math.SQRT1_2;
  let difference = erfcx(u) - erfcx(v);
  if (gap < 1e-5) {  // then minus the slope of erfcx between the two, far out by its asymptotic series
    const middle = 0.5 * (u + v), root = Math.sqrt(Math.PI);
    const slope = middle > 60
      ? (1 - 1.5 / middle ** 2) / (root * middle ** 2)
      : 2 / root - 2 * middle * erfcx(middle);
    difference = gap * slope;
  }
  return -Math.LN2 - a * a / 2 + Math.log(difference);
}

// Neighbouring doubles around the place where an increasing condition begins to hold.
function bisect(above, low, high) {
  for (let i = 0; i < 90; i++) {
    const middle = 0.5 * (low + high);
    if (above(middle)) high = middle; else low = middle;
  }
  return [low, high];
}

function exactBudget(epsilon, delta) {
  const target = Math.log(delta);
  const [low] = bisect((logMu) => logDelta(epsilon, Math.exp(logMu)) > target, Math.log(1e-40), Math.log(1e12));
  return 0.5 * Math.exp(2 * low);
}

function exactEpsilon(loss, delta) {
  const mu = Math.sqrt(2 * loss), target = Math.log(delta);
  if (erf(mu / (2 * Math.SQRT2)) <= delta) return 0;
  const enough = Math.log(mu * mu / 2 + mu * Math.sqrt(-2 * target) + 1e-300);
  const [, high] = bisect((logEpsilon) => logDelta(Math.exp(logEpsilon), mu) <= target, Math.log(1e-300), enough);
  return Math.exp(high);
}

// C⁻¹(1/δ) with C(x) = √π x e^{x²}: w = 2x² solves w + log w = log(2/(π δ²)), by Newton's method in log w.
function paperConstant(delta) {
  const z = Math.LN2 - 2 * Math.log(delta) - Math.log(Math.PI);
  let log = z > 1 ? Math.log(z) : z - 1;
  for (let i = 0; i < 50; i++) {
    const w = Math.exp(log), move = (w + log - z) / (w + 1);
    log -= move;
    if (Math.abs(move) < 1e-16) break;
  }
  return Math.sqrt(Math.exp(log) / 2);
}

function paperBudget(epsilon, delta) {
  const c = paperConstant(delta);
  return (epsilon / (Math.sqrt(epsilon + c * c) + c)) ** 2;
}

const ACCOUNTANTS = {
  exact: { budget: exactBudget, epsilon: exactEpsilon },
  paper: {
    budget: paperBudget,
    epsilon: (loss, delta) => loss + 2 * paperConstant(delta) * Math.sqrt(loss),
  },
};
