// SPDX-License-Identifier: Apache-2.0
"use strict";
const root = document.documentElement;
document.getElementById("theme").addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
const chart = document.getElementById("lanes");
let zoom = 1;
function scale(factor) {
  zoom = Math.min(64, Math.max(1, zoom * factor));
  const box = chart.parentElement;
  const centre = (box.scrollLeft + box.clientWidth / 2) / box.scrollWidth;
  chart.setAttribute("width", (100 * zoom) + "%");
  box.scrollLeft = centre * box.scrollWidth - box.clientWidth / 2;
}
if (chart) {
  document.getElementById("in").addEventListener("click", () => scale(2));
  document.getElementById("out").addEventListener("click", () => scale(0.5));
}
