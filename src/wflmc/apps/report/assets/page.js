// Draws every figure of the page from the JSON beside it.
"use strict";
const LOOK = {
  font: { family: "system-ui, sans-serif", size: 13, color: "#1a1a1a" },
  colorway: ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"],
  margin: { l: 70, r: 20, t: 30, b: 50 },
  dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",  // a finger scrolls the page
};
// No button that would hand the figure to a service, and none that does nothing here.
const CONFIG = {
  responsive: true,
  displaylogo: false,
  showSendToCloud: false,
  plotlyServerURL: "",
  modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"],
};
for (const script of document.querySelectorAll("script.drawing")) {
  const drawing = JSON.parse(script.textContent);
  Plotly.newPlot(script.dataset.for, drawing.data, { ...LOOK, ...drawing.layout }, CONFIG);
}
