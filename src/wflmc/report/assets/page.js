// Draws every figure of the page from the JSON beside it.
"use strict";
const LOOK = {
  font: { family: "system-ui, sans-serif", size: 13, color: "#1a1a1a" },
  colorway: ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"],
  margin: { l: 70, r: 20, t: 30, b: 50 },
};
const CONFIG = { responsive: true, displaylogo: false };
for (const script of document.querySelectorAll("script.drawing")) {
  const drawing = JSON.parse(script.textContent);
  Plotly.newPlot(script.dataset.for, drawing.data, { ...LOOK, ...drawing.layout }, CONFIG);
}
