// Draws the charts: each when it comes near the screen, again when the theme changes.
"use strict";
(() => {
  const PALETTES = { // after Okabe and Ito, made darker or lighter until each is clear on its background
    light: ["#0072b2", "#d55e00", "#008a64", "#a8518a", "#b87a00", "#2b8cc4", "#7a6c00", "#3b4048", "#8c564b", "#7f7f7f"],
    dark: ["#4da3e0", "#ff8c42", "#2fcb9b", "#e39bc4", "#f0b429", "#8fd3ff", "#e6dd5a", "#d5dae0", "#d19a8c", "#9c9c9c"],
  };
  const INK = {
    light: { text: "#1b1f24", soft: "#586069", grid: "#e6e8eb", card: "#ffffff", bad: "#b3261e" },
    dark: { text: "#e6e9ed", soft: "#a0a8b2", grid: "#2c323a", card: "#181c22", bad: "#ff8a80" },
  };
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const button = document.getElementById("theme");
  let chosen = "auto";
  try { chosen = localStorage.getItem("quiesce-theme") || "auto"; } catch (error) { /* a file may have no storage */ }
  const forced = new URLSearchParams(location.search).get("theme");
  if (forced) chosen = forced;

  const theme = () => (chosen === "auto" ? (system.matches ? "dark" : "light") : chosen);

  // A figure with its colour tokens replaced: c0 … c9, c0a … c9a (half transparent), bad.
  function coloured(value, now) {
    if (typeof value === "string") {
      if (value === "bad") return INK[now].bad;
      const token = /^c(\d)(a?)$/.exec(value);
      return token ? PALETTES[now][token[1]] + (token[2] ? "99" : "") : value;
    }
    if (value === null || typeof value !== "object") return value;
    if (Array.isArray(value)) return value.length && typeof value[0] !== "object" ? value : value.map((item) => coloured(item, now));
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, coloured(item, now)]));
  }

  function themed(figure) {
    const now = theme();
    const ink = INK[now];
    const copy = coloured(figure, now);
    const layout = copy.layout;
    layout.paper_bgcolor = layout.plot_bgcolor = "rgba(0,0,0,0)";
    layout.font = { family: getComputedStyle(document.body).fontFamily, size: 12, color: ink.text };
    for (const axis of ["xaxis", "yaxis"]) {
      layout[axis] = { gridcolor: ink.grid, linecolor: ink.grid, zerolinecolor: ink.grid, tickfont: { color: ink.soft }, ...layout[axis] };
    }
    layout.hoverlabel = { bgcolor: ink.card, bordercolor: ink.soft, font: { color: ink.text } };
    return copy;
  }

  const drawn = new Set();
  function draw(node) {
    const { data, layout } = themed(figures[node.id]);
    drawn.add(node);
    return Plotly.react(node, data, layout, { responsive: true, displayModeBar: false });
  }

  function apply() {
    document.documentElement.dataset.theme = theme();
    button.textContent = { auto: "Theme: system", light: "Theme: light", dark: "Theme: dark" }[chosen];
    drawn.forEach(draw);
  }
  button.addEventListener("click", () => {
    chosen = { auto: "light", light: "dark", dark: "auto" }[chosen] || "auto";
    try { localStorage.setItem("quiesce-theme", chosen); } catch (error) { /* as above */ }
    apply();
  });
  system.addEventListener("change", apply);
  apply();

  const waiting = [...document.querySelectorAll(".chart")];
  const near = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting && !drawn.has(entry.target)) { near.unobserve(entry.target); draw(entry.target); }
  }, { rootMargin: "600px" });
  waiting.forEach((node) => near.observe(node));
  // The rest one by one, so that searching and printing find all of it.
  function next() {
    const node = waiting.find((item) => !drawn.has(item));
    if (!node) { document.documentElement.dataset.ready = "yes"; return; }
    near.unobserve(node);
    draw(node).then(() => setTimeout(next, 0));
  }
  setTimeout(next, 50);
})();
