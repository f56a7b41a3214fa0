// The explorer's three pictures: the regime map, the plan, and the bound.

const INK = {
  lmc: "#8a7d00", power: "#0072b2", dp: "#b35c00", rest: "#5a6270", noise: "#d55e00", steps: "#009e73",
  posterior: "#a0307a",
};
const AXES = {
  epsilon: "privacy level ε", delta: "privacy slack δ", step_size: "step size η", rounds: "rounds S", clip: "clip ℓ",
};
const axisName = ({ map_axis: axis, adjacency }) => AXES[axis] + (axis === "epsilon" ? ` (${adjacency})` : "");
const MOST_DRAWN = 1000, ROWS = 61;
const MAP = { l: 70, r: 20, t: 10, b: 50 };

const tinted = (name, alpha) => COLORS[name] + Math.round(255 * alpha).toString(16).padStart(2, "0");
const legend = { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12 } };

function draw(id, traces, layout, words, config = CONFIG) {
  const place = at(id);
  place.setAttribute("aria-label", words);
  Plotly.react(place, traces, { ...LOOK, ...layout }, config);
}

// Where a map reaches: the slider's range, and the present point in any case.
function reach(key, value) {
  const [low, high] = ranges[key]();
  return [Math.min(low, value), Math.max(high, value)];
}

/* The map over SNR and one other value. Given that value, power binds up to one SNR, the edge; beyond it Langevin noise
   or privacy does, whichever allows less. Rows are such values, and those where what binds beyond the edge changes. */
function regimeMap(state) {
  const axis = state.map_axis;
  const x = reach("snr_db", state.snr_db), [low, high] = reach(axis, state[axis]).map(Math.log);
  const row = (log) => {
    const { lmc, power, share } = limits({ ...state, snr_db: 0, [axis]: Math.exp(log) });
    return { y: Math.exp(log), edge: 10 * Math.log10(Math.min(lmc, share) / power), beyond: lmc <= share ? 0 : 2 };
  };
  const rows = [];
  for (let i = 0; i < ROWS; i++) {
    const log = low + (high - low) * i / (ROWS - 1), next = row(log), last = rows.at(-1);
    if (last && last.beyond !== next.beyond) {
      const [before, after] = bisect((middle) => row(middle).beyond === next.beyond, Math.log(last.y), log);
      rows.push({ ...row(before), beyond: last.beyond }, { ...row(after), beyond: next.beyond });
    }
    rows.push(next);
  }
  return { x, rows };
}

// Outlines of the map's regions: [regime, rows, from where, to where] with SNRs as functions of a row.
function regions({ x: [left, right], rows }) {
  const edge = (row) => Math.min(Math.max(row.edge, left), right);
  const found = [[1, rows, () => left, edge]];
  for (let first = 0, i = 1; i <= rows.length; i++) {
    if (i < rows.length && rows[i].beyond === rows[first].beyond) continue;
    found.push([rows[first].beyond, rows.slice(first, i), edge, () => right]);
    first = i;
  }
  return found;
}

function regionTrace([regime, rows, from, to]) {
  return {
    x: [...rows.map(from), ...rows.map(to).reverse()], y: [...rows, ...rows.toReversed()].map((row) => row.y),
    mode: "lines", line: { color: "#1a1a1a", width: 1 }, fill: "toself", fillcolor: tinted(REGIMES[regime], 0.75),
    hoveron: "fills", text: NAMES[REGIMES[regime]], hoverinfo: "text", showlegend: false,
  };
}

// A region's name in its middle, if there is room, and above the present point where that is in the way.
function regionLabel([regime, rows, from, to], [left, right], here) {
  const widths = rows.map((row) => (to(row) - from(row)) / (right - left)), area = total(widths);
  if (area < 0.04 * ROWS) return [];
  let sum = 0;
  const middle = rows[widths.findIndex((width) => (sum += width) >= area / 2)];
  const x = (from(middle) + to(middle)) / 2, y = Math.log10(middle.y), font = { size: 14, color: "#1a1a1a" };
  const covered = Math.abs(x - here.x[0]) < 0.15 * (right - left) && Math.abs(Math.log(middle.y / here.y[0])) < 1;
  return [{ x, y, text: NAMES[REGIMES[regime]], showarrow: false, font, yshift: covered ? 30 : 0 }];
}

function drawMap(state, result) {
  const axis = state.map_axis, map = regimeMap(state), all = regions(map);
  const here = {
    x: [state.snr_db], y: [state[axis]], mode: "markers", showlegend: false, cliponaxis: false,
    marker: { size: 15, color: "#ffffff", line: { color: "#000000", width: 3.5 } },
    hovertemplate: `here: SNR %{x} dB, ${axisName(state)} %{y}<extra>${NAMES[result.regime]}</extra>`,
  };
  const ends = [map.rows[0].y, map.rows.at(-1).y].map(Math.log10);
  const words = `Regime map over SNR and ${axisName(state)}; the present point is ${NAMES[result.regime]}.`;
  draw("explorer-map", [...all.map(regionTrace), here], {
    margin: MAP, hovermode: "closest", dragmode: false,
    annotations: all.flatMap((region) => regionLabel(region, map.x, here)),
    xaxis: { title: { text: "SNR (dB)" }, range: map.x, zeroline: false, fixedrange: true },
    yaxis: {
      title: { text: axisName(state) }, type: "log", range: ends, exponentformat: "power", dtick: 1, fixedrange: true,
    },
  }, words, { ...CONFIG, displayModeBar: false });
}

// The point of the map under the pointer.
function mapPoint(event, state) {
  const axis = state.map_axis, { x, rows } = regimeMap(state);
  const place = at("explorer-map").getBoundingClientRect();
  const across = (event.clientX - place.left - MAP.l) / (place.width - MAP.l - MAP.r);
  const up = 1 - (event.clientY - place.top - MAP.t) / (place.height - MAP.t - MAP.b);
  if (Math.min(across, up) < 0 || Math.max(across, up) > 1) return {};
  const value = rows[0].y * (rows.at(-1).y / rows[0].y) ** up;
  const rounded = axis === "rounds" ? Math.max(1, Math.round(value)) : Number(value.toPrecision(3));
  return { snr_db: Number((x[0] + across * (x[1] - x[0])).toFixed(1)), [axis]: rounded };
}

// Which rounds to draw: all, or as many as a screen can show, and always the last.
function drawn(rounds) {
  const stride = Math.ceil(rounds / MOST_DRAWN), kept = [];
  for (let i = rounds - 1; i >= 0; i -= stride) kept.push(i);
  return kept.reverse();
}

// The limit of each run of rounds, as a background.
function shades(limit) {
  const found = [];
  for (let first = 0, i = 1; i <= limit.length; i++) {
    if (i < limit.length && limit[i] === limit[first]) continue;
    const shape = { type: "rect", yref: "paper", y0: 0, y1: 1, x0: first + 0.5, x1: i + 0.5, layer: "below" };
    found.push({ ...shape, line: { width: 0 }, fillcolor: tinted(REGIMES[limit[first]], 0.3) });
    first = i;
  }
  return found;
}

const level = (value, rounds, name, color, dash = "dash") => ({
  x: [0.5, rounds + 0.5], y: [value, value], name, mode: "lines",
  line: { color, dash, width: dash === "dot" ? 2 : 1.5 }, hovertemplate: `${name}: %{y:.4g}<extra></extra>`,
});

function drawPlan(state, result) {
  const { rounds } = state, kept = drawn(rounds), x = kept.map((i) => i + 1);
  const pick = (values) => kept.map((i) => values[i]);
  const stairs = { shape: "hvh", color: "#1a1a1a", width: 2 };
  const below = { yaxis: "y2", showlegend: false };
  const traces = [
    { x, y: pick(result.gain), name: "gain α", line: stairs, hovertemplate: "round %{x}: α = %{y:.4g}<extra></extra>" },
    level(result.lmc_cap, rounds, "LMC cap", INK.lmc),
    level(result.power_cap, rounds, "power cap", INK.power),
    level(result.dp_share, rounds, "equal share of the budget", INK.dp, "dot"),
    {
      x, y: pick(result.loss_each), name: "loss", line: stairs, fill: "tozeroy", fillcolor: "#0072b240", ...below,
      hovertemplate: "round %{x}: loss %{y:.4g}<extra></extra>",
    },
    { ...level(result.loss_cap, rounds, "loss at the lower cap", INK.rest), ...below, showlegend: true },
    { ...level(result.loss_share, rounds, "equal share of the budget", INK.dp, "dot"), ...below },
  ];
  const words = `Gain from ${shown(result.gain[0])} in the first round to ${shown(result.gain.at(-1))} in the last.`;
  const most = Math.max(result.loss_share, ...pick(result.loss_each)) * 1.15;
  draw("explorer-plan", traces, {
    legend, shapes: shades(result.limit), margin: { ...LOOK.margin, t: 85 },
    xaxis: { title: { text: "round" }, range: [0.5, rounds + 0.5], anchor: "y2" },
    yaxis: { title: { text: "gain α" }, type: "log", domain: [0.42, 1], exponentformat: "power" },
    yaxis2: { title: { text: "privacy loss" }, domain: [0, 0.33], range: [0, most], exponentformat: "power" },
  }, words);
}

function drawBound(state, result) {
  const { rounds } = state, kept = drawn(rounds), x = kept.map((i) => i + 1);
  const trace = (name, values, line) => ({
    x, y: kept.map((i) => values[i]), name, mode: rounds > 1 ? "lines" : "markers", line,
    hovertemplate: `round %{x}, ${name}: %{y:.4g}<extra></extra>`,
  });
  const least = Math.min(result.floor, result.spread, ...result.bound);
  const most = Math.max(result.spread, ...result.bound, ...result.equal_bound);
  const traces = [
    trace("bound B[s]", result.bound, { color: "#1a1a1a", width: 3 }),
    trace("equal power", result.equal_bound, { color: INK.rest, width: 1.5, dash: "dash" }),
    trace("left of the start", result.from_start, { color: INK.power, width: 1.5 }),
    trace("discretisation", result.from_steps, { color: INK.steps, width: 1.5 }),
    trace("excess noise", result.from_noise, { color: INK.noise, width: 1.5 }),
    level(result.floor, rounds, "floor", INK.steps, "dot"),
    level(result.spread, rounds, "posterior, m/μ", INK.posterior),
  ];
  const words = `The bound on W2² is ${shown(result.objective)} after ${rounds} rounds, its floor ${shown(result.floor)}.`;
  draw("explorer-bound", traces, {
    legend, margin: { ...LOOK.margin, t: 85 },
    xaxis: { title: { text: "round" }, range: [0.5, rounds + 0.5] },
    yaxis: {
      title: { text: "bound on W2²" }, type: "log", exponentformat: "power",
      range: [Math.log10(least) - 0.5, Math.log10(most) + 0.15],
    },
  }, words);
}
