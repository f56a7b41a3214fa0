// The explorer's controls: what is chosen, what is wrong with it, and what follows from it.

const root = document.getElementById("explorer");
const at = (id) => root.querySelector(`#${id}`);
const sliders = [...root.querySelectorAll("input[type=range]")].map((slider) => slider.id);
const numbers = [...root.querySelectorAll("input[type=number]")].map((field) => field.dataset.key);
const choices = [...root.querySelectorAll("select")].map((select) => select.id);

const field = (key) => at(sliders.includes(key) ? `${key}-number` : key);
const shown = (value) => String(Number(value.toPrecision(4)));
// A double as TOML writes it, to the last digit.
const real = (value) => (/^-?\d+$/.test(String(value)) ? `${value}.0` : String(value));

let state = { ...START };
let result = null;
let wrong = {};

// Positions of a slider are values, or logarithms of them; those of the step size are relative to 2/L.
const unitOf = (key) => (key === "step_size" ? 2 / state.L : 1);
const isLog = (key) => at(key).dataset.scale === "log";

function fromSlider(key) {
  const position = Number(at(key).value);
  return isLog(key) ? Number((unitOf(key) * 10 ** position).toPrecision(3)) : position;
}

const toSlider = (key) => (isLog(key) ? Math.log10(state[key] / unitOf(key)) : state[key]);

const ranges = Object.fromEntries(sliders.map((key) => [key, () => {
  const ends = [Number(at(key).min), Number(at(key).max)];
  return isLog(key) ? ends.map((end) => unitOf(key) * 10 ** end) : ends;
}]));

// What is wrong, by control, as the end of a sentence.
function check(point) {
  const found = {};
  for (const key of numbers) {
    const { least, most, step } = { ...field(key).dataset, step: field(key).step }, value = point[key];
    if (key === "example_clip" && point.unit !== "record") continue;
    if (!Number.isFinite(value)) found[key] = "must be a number";
    else if (step === "1" && !Number.isInteger(value)) found[key] = "must be a whole number";
    else if (value < Number(least) || value > Number(most)) found[key] = `must be between ${least} and ${most}`;
  }
  for (const key of choices) {
    const known = [...at(key).options].map((option) => option.value);
    if (!known.includes(point[key])) found[key] = `must be one of ${known.join(", ")}`;
  }
  const { mu, L, step_size: eta } = point;
  if (found.mu || found.L) return found;
  if (mu > L) found.mu = `must be at most L = ${shown(L)}`;
  else if (eta >= 2 / L) found.step_size = `must be below 2/L = ${shown(2 / L)}: from there on a step no longer contracts`;
  else if (!found.step_size && contraction(point).distance < 1e-12) found.step_size = "is too small to forget the start";
  return found;
}

const WORDS = {
  snr_db: () => `${shown(state.snr_db)} dB`,
  epsilon: () => shown(state.epsilon),
  delta: () => shown(state.delta),
  step_size: () => `${shown(state.step_size)} = ${shown(state.step_size * (state.mu + state.L))}/(μ+L)`,
  devices: () => `${state.devices}`,
  rounds: () => `${state.rounds}: ${state.rounds - 1} thrown away, 1 kept`,
  clip: () => shown(state.clip),
};

function showControls(typed) {
  for (const key of sliders) {
    const words = Number.isFinite(state[key]) ? WORDS[key]() : "";
    if (typed !== key) at(key).value = toSlider(key);
    at(key).setAttribute("aria-valuetext", words);
    at(`${key}-shown`).textContent = words;
  }
  for (const key of numbers) {
    if (typed !== field(key).id) field(key).value = Number.isFinite(state[key]) ? String(state[key]) : "";
  }
  for (const key of choices) at(key).value = state[key];
  for (const key of [...numbers, ...choices]) {
    const control = sliders.includes(key) ? field(key) : at(key);
    control.setAttribute("aria-invalid", String(key in wrong));
    at(`${key}-wrong`).textContent = key in wrong ? `${control.dataset.name} ${wrong[key]}.` : "";
  }
  at("example_clip-row").hidden = state.unit !== "record";
}

const VERDICTS = {
  "lmc-limited": () => "The channel is quieter than Langevin sampling needs, and privacy comes for free: the bound is that of ideal devices. More power or a larger ε would change nothing.",
  "power-limited": () => `Transmit power is the bottleneck in every round, and it leaves ${shown(100 * (1 - result.loss / result.budget))} % of the privacy budget unspent. A higher SNR helps; a larger ε does not.`,
  "dp-limited": () => `The promise (ε, δ) holds power back in ${Math.round(result.regime_share["dp-limited"] * state.rounds)} of ${state.rounds} rounds. The best plan whispers early, when noise is still forgotten, and saves the budget for the end: ${shown(result.equal_objective / result.objective)} times below equal power. A larger ε helps${result.regime_share["power-limited"] ? ", and so does a higher SNR" : "; a higher SNR does not"}.`,
};

function cautions() {
  const found = [];
  if (result.loud_rounds) {
    found.push(`In ${result.loud_rounds} of ${state.rounds} rounds the noise exceeds what all clipped gradients together can undo (η K ℓ). The bound ignores clipping, and chains may not come back.`);
  }
  if (result.objective > 10 * state.initial_w2_sq) {
    found.push("The bound is far above the distance at the start: it says nothing here.");
  }
  return found.join(" ");
}

function showResults() {
  const values = { ...result, "gain-first": result.gain[0], "gain-last": result.gain.at(-1) };
  for (const place of root.querySelectorAll("[data-result]")) {
    const value = values[place.id];
    place.dataset.value = String(value);
    place.textContent = typeof value === "number" ? shown(value) : NAMES[value];
  }
  at("regime").style.background = COLORS[result.regime];
  at("headline").textContent = shown(result.objective);
  at("verdict").textContent = VERDICTS[result.regime]();
  at("cautions").textContent = cautions();
  at("cautions").hidden = !cautions();
  at("scenario").value = scenarioText();
}

function scenarioText() {
  const { devices, rounds, unit } = state;
  return [
    `# ${NAMES[result.regime]}: W2² at most ${shown(result.objective)} after ${rounds} rounds (Theorem 1).`,
    "# Data are synthetic; mu, L and initial_w2_sq stand for those of your own.",
    "[posterior]", 'model = "gaussian"', `devices = ${devices}`, `dim = ${state.dim}`,
    ...(devices > 1200 ? [`examples = ${devices}`] : []),
    `mu = ${real(state.mu)}`, `L = ${real(state.L)}`, `initial_w2_sq = ${real(state.initial_w2_sq)}`,
    "", "[link]", 'fading = "static"', `power = ${real(state.power)}`, `snr_db = ${real(state.snr_db)}`,
    `noise_power = ${real(state.noise_power)}`,
    "", "[privacy]", `epsilon = ${real(state.epsilon)}`, `delta = ${real(state.delta)}`, `clip = ${real(state.clip)}`,
    ...(unit === "record" ? ['unit = "record"', `example_clip = ${real(state.example_clip)}`] : []),
    `accountant = "${state.accountant}"`,
    "", "[sampler]", `step_size = ${real(state.step_size)}`, `burn_in = ${rounds - 1}`, "samples = 1",
    "", "[policy]", 'power = "optimized"', 'schedule = "all"', `bound = "${state.bound}"`, "",
  ].join("\n");
}

// Pictures that are behind; each frame draws one, in turn, so that sliders never wait for all of them.
const pictures = [() => drawMap(state, result, state.map_axis), () => drawPlan(state, result), () => drawBound(state, result)];
let behind = [];

function drawNext() {
  behind.shift()();
  if (behind.length) requestAnimationFrame(drawNext);
}

function drawSoon() {
  if (!behind.length) requestAnimationFrame(drawNext);
  behind.push(...pictures.filter((picture) => !behind.includes(picture)));
}

// Take a point: say what is wrong with it, or show what follows. What was typed is left as it was typed.
function choose(changes, typed) {
  state = { ...state, ...changes };
  wrong = check(state);
  const valid = Object.keys(wrong).length === 0;
  showControls(typed);
  root.querySelector(".explorer").classList.toggle("stale", !valid);
  at("copy").disabled = !valid;
  at("copied").textContent = "";
  if (!valid) return;
  result = compute(state);
  showResults();
  drawSoon();
}

// The point that the address names; an address may also name a part of the page.
function fromHash() {
  const found = {};
  if (!location.hash.includes("=")) return found;
  for (const [key, text] of new URLSearchParams(location.hash.slice(1))) {
    if (numbers.includes(key)) found[key] = text.trim() === "" ? NaN : Number(text);
    else if (choices.includes(key)) found[key] = text;
  }
  return found;
}

const toHash = () => history.replaceState(null, "", `#${new URLSearchParams(state)}`);

for (const key of sliders) at(key).addEventListener("input", () => choose({ [key]: fromSlider(key) }, key));
for (const key of numbers) field(key).addEventListener("input", () => choose({ [key]: field(key).valueAsNumber }, field(key).id));
for (const key of choices) at(key).addEventListener("input", () => choose({ [key]: at(key).value }));
root.addEventListener("change", toHash);
window.addEventListener("hashchange", () => choose(fromHash()));
at("reset").addEventListener("click", () => { choose(START); toHash(); });
at("copy").addEventListener("click", async () => {
  at("scenario").select();
  try {
    await navigator.clipboard.writeText(at("scenario").value);
    at("copied").textContent = "copied";
  } catch {
    at("copied").textContent = "the text is selected: press Ctrl+C or ⌘C";
  }
});

choose(START);
choose(fromHash());
at("explorer-map").addEventListener("click", (event) => {
  choose(mapPoint(event, state, state.map_axis));
  toHash();
});

window.wflmc = {
  get state() { return state; },
  get result() { return result; },
  get wrong() { return wrong; },
  get map() { return regimeMap(state, state.map_axis); },
  compute, choose, erfcx,
};
