// The explorer's controls: what is chosen, what is wrong with it, and what follows from it.

const root = document.getElementById("explorer");
const at = (id) => root.querySelector(`#${id}`);
const sliders = [...root.querySelectorAll("input[type=range]")].map((slider) => slider.id);
const numbers = [...root.querySelectorAll("input[type=number]")].map((field) => field.dataset.key);
const choices = [...root.querySelectorAll("select")].map((select) => select.id);

const field = (key) => at(sliders.includes(key) ? `${key}-number` : key);

let state = { ...START };
let pictured = START;  // the last point with nothing wrong, and what follows from it
let result = null;
let wrong = {};

// Positions of a slider are values, or logarithms of them; those of the step size are relative to 2/L.
const unitOf = (key) => (key === "step_size" ? 2 / state.L : 1);
const isLog = (key) => at(key).dataset.scale === "log";

function fromSlider(key) {
  const position = Number(at(key).value);
  if (!isLog(key)) return position;
  const exact = unitOf(key) * 10 ** position, rounded = Number(exact.toPrecision(3));
  return key === "step_size" && rounded >= unitOf(key) ? exact : rounded;
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
  else if (eta >= 2 / L) found.step_size = `must be below 2/L = ${shown(2 / L)}: larger steps do not contract`;
  else if (!found.step_size && contraction(point).distance < 1e-12) found.step_size = "is too small to contract";
  return found;
}

const WORDS = {
  snr_db: () => `${shown(state.snr_db)} dB`,
  epsilon: () => `${shown(state.epsilon)} (${state.adjacency})`,
  delta: () => shown(state.delta),
  step_size: () => `${shown(state.step_size)} = ${shown(state.step_size * (state.mu + state.L))}/(μ+L)`,
  devices: () => `${state.devices}`,
  rounds: () => `${state.rounds}: ${state.rounds - 1} discarded, 1 kept`,
  clip: () => shown(state.clip),
};

function showControls(typed) {
  for (const key of sliders) {
    const words = key in wrong ? "" : WORDS[key]();
    if (typed !== key) at(key).value = toSlider(key);
    at(key).setAttribute("aria-valuetext", words);
    at(`${key}-shown`).textContent = words;
  }
  for (const key of numbers) {
    const value = state[key];
    if (typed !== field(key).id) field(key).value = Number.isFinite(value) ? String(Number(value.toPrecision(6))) : "";
    field(key).title = String(value);
  }
  for (const key of choices) at(key).value = state[key];
  for (const key of [...numbers, ...choices]) {
    const control = sliders.includes(key) ? field(key) : at(key);
    control.setAttribute("aria-invalid", String(key in wrong));
    at(`${key}-wrong`).textContent = key in wrong ? `${control.dataset.name} ${wrong[key]}.` : "";
    const fold = control.closest("details");
    if (fold && key in wrong) fold.open = true;
  }
  const all = [...root.querySelectorAll(".control .wrong")].map((place) => place.textContent).filter(Boolean);
  at("trouble").textContent = all.length ? `Mistake: ${all.join(" ")} Shown is the last point without one.` : "";
  at("example_clip-row").hidden = state.unit !== "record";
}

function showResults() {
  const values = { ...result, "gain-first": result.gain[0], "gain-last": result.gain.at(-1) };
  for (const place of root.querySelectorAll("[data-result]")) {
    const value = values[place.id];
    place.dataset.value = String(value);
    place.textContent = typeof value === "number" ? shown(value) : NAMES[value];
  }
  for (const place of root.querySelectorAll(".adjacency")) place.textContent = state.adjacency;
  at("regime").style.background = COLORS[result.regime];
  at("headline").textContent = shown(result.objective);
  at("scale").textContent = scaleText(result);
  at("verdict").textContent = VERDICTS[result.regime](state, result);
  at("cautions").textContent = cautions(state, result);
  at("cautions").hidden = !at("cautions").textContent;
  at("scenario").value = scenarioText(state, result);
}

// Pictures that are behind. Each frame draws one that can be seen, in turn, so that sliders never wait for all of them.
const pictures = { "explorer-map": drawMap, "explorer-plan": drawPlan, "explorer-bound": drawBound };
const behind = new Set();
let scheduled = false;

function drawSoon() {
  if (!scheduled) requestAnimationFrame(drawNext);
  scheduled = true;
}

function drawNext() {
  scheduled = false;
  const id = [...behind].find((name) => {
    const { top, bottom } = at(name).getBoundingClientRect();
    return bottom > 0 && top < window.innerHeight;
  });
  if (!id) return;
  behind.delete(id);
  pictures[id](pictured, result);
  drawSoon();
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
  pictured = state;
  result = compute(state);
  showResults();
  Object.keys(pictures).forEach((id) => behind.add(id));
  drawSoon();
}

// The point that the address names: the start, but for what it names. An address may also name a part of the page.
function fromHash() {
  if (!location.hash.includes("=")) return {};
  const found = { ...START };
  for (const [key, text] of new URLSearchParams(location.hash.slice(1))) {
    if (numbers.includes(key)) found[key] = text.trim() === "" ? NaN : Number(text);
    else if (choices.includes(key)) found[key] = text;
  }
  return found;
}

const toHash = () => history.replaceState(null, "", `#${new URLSearchParams(state)}`);

for (const key of sliders) at(key).addEventListener("input", () => choose({ [key]: fromSlider(key) }, key));
for (const key of numbers) {
  field(key).addEventListener("input", () => choose({ [key]: field(key).valueAsNumber }, field(key).id));
}
for (const key of choices) at(key).addEventListener("input", () => choose({ [key]: at(key).value }));
root.addEventListener("change", toHash);
window.addEventListener("scroll", drawSoon);
window.addEventListener("resize", drawSoon);
window.addEventListener("beforeprint", () => behind.forEach((id) => pictures[id](pictured, result)));
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
  choose(mapPoint(event, pictured));
  toHash();
});

window.wflmc = {
  get state() { return state; },
  get result() { return result; },
  get wrong() { return wrong; },
  get map() { return regimeMap(pictured); },
  compute, choose, erfcx,
};
