/** States over time: a row for each series, a bar for as long as a state lasts. Rule: no state is drawn where no sample was. */

import { Chart, textWidth } from "./chart.js";
import { colour, faded, paletteColour, readableOn } from "./colours.js";
import { h } from "./dom.js";
import { display } from "./fields.js";
import { displayName, numbers } from "./frames.js";
import { theme, token } from "./theme.js";

/** Spans of one state each: {from, to, value, text, colour, missing}. Samples apart by more than `limit` ms make a gap. */
export function spans(times, values, config, { stepMs, limit, merge = true, themeName, index = 0, end = Infinity }) {
  const found = [];
  for (let at = 0; at < times.length; at += 1) {
    if (values[at] === null || values[at] === undefined) continue;
    const from = times[at];
    const next = times[at + 1];
    const to = Math.min(next !== undefined && next - from <= limit ? next : from + stepMs, Math.max(end, from));
    const shown = display(values[at], config, themeName, { index });
    const last = found.at(-1);
    if (merge && last && last.to === from && last.text === shown.text && last.colour === shown.colour) last.to = to;
    else found.push({ from, to, value: values[at], text: shown.text, colour: shown.colour, colourName: shown.colourName });
  }
  return found;
}

const MOST_THICK = 36; // pixels

function shorten(text, pixels) {
  if (textWidth(text) <= pixels) return text;
  let kept = text;
  while (kept.length > 3 && textWidth(`${kept}…`) > pixels) kept = kept.slice(0, -1);
  return `${kept}…`;
}

/** Draws a `state-timeline` panel in its body. */
export class StateTimeline {
  constructor(body, room) {
    this.holder = h("div", { class: "chart-holder" });
    this.legend = h("div", { class: "legend" });
    body.append(this.holder, this.legend);
    this.chart = new Chart(this.holder, room);
  }

  /** Draw what was asked; see panel.js. Returns what was drawn. */
  draw({ panel, frames, range, stepMs, marks }) {
    const options = panel.options ?? {};
    const rows = numbers(frames).map(({ frame, field, times }, index) => ({
      name: displayName(field, frame, { single: true }),
      field,
      spans: spans(times, field.values, field.config, { stepMs, limit: stepMs * 1.5, merge: options.mergeValues !== false, themeName: theme(), index, end: range.to }),
    })).reverse(); // the first row is on top
    const share = options.rowHeight ?? 0.9;
    // A bar that says one word need not fill the panel, however few rows there are.
    const half = Math.min(0.48, share / 2, MOST_THICK / 2 / Math.max(1, (this.chart.box.clientHeight - 36) / Math.max(1, rows.length)));
    const traces = [];
    const byColour = new Map();
    rows.forEach((row, place) => row.spans.forEach((span) => byColour.set(span.colour, [...(byColour.get(span.colour) ?? []), { ...span, place }])));
    const opacity = (rows[0]?.field.config.custom?.fillOpacity ?? 80) / 100;
    const width = this.chart.box.clientWidth || 600;
    const perMs = (width * 0.8) / (range.to - range.from);
    for (const [tint, all] of byColour) {
      const fill = faded(tint, Math.max(0.35, opacity));
      traces.push({
        type: "bar", orientation: "h", hoverinfo: "skip", width: half * 2, base: all.map((span) => span.from), x: all.map((span) => span.to - span.from), y: all.map((span) => span.place),
        marker: { color: fill, line: { width: 0 } },
        text: all.map((span) => (options.showValue !== "never" && textWidth(span.text) + 8 < (span.to - span.from) * perMs ? span.text : "")),
        textposition: "inside", insidetextanchor: "start", textangle: 0, constraintext: "none", textfont: { color: opacity > 0.6 ? readableOn(tint) : token("--text"), size: 11 },
      });
    }
    const most = Math.max(60, width * 0.34);
    const y = { low: -0.5, high: rows.length - 0.5, values: rows.map((_, index) => index), texts: rows.map((row) => shorten(row.name, most)), noGrid: true };
    this.#legend(rows, options.legend);
    this.chart.draw({
      traces, x: range, y, marks, step: stepMs, layout: { barmode: "overlay" },
      label: `${panel.title}: states of ${rows.length} series over time. ${rows.slice().reverse().map((row) => `${row.name}: ${row.spans.at(-1)?.text ?? "no data"}`).join("; ")}`,
      tooltip: (x, part) => {
        const row = rows[Math.round(part * rows.length - 0.5)];
        const span = row?.spans.find((each) => each.from <= x && x < each.to);
        return span ? { time: x, rows: [h("div", { class: "tip-row" }, h("i", { class: "swatch", style: { background: span.colour } }), h("span", {}, row.name), h("b", {}, span.text))] } : null;
      },
    });
    return { series: rows.length, points: rows.reduce((sum, row) => sum + row.spans.length, 0), states: rows.slice().reverse().map((row) => `${row.name}=${row.spans.at(-1)?.text ?? ""}`).join(";") };
  }

  #legend(rows, options = {}) {
    const seen = new Map();
    for (const span of rows.flatMap((row) => row.spans)) if (!seen.has(span.text)) seen.set(span.text, span.colour);
    this.legend.hidden = options?.showLegend === false || !seen.size || seen.size > 12;
    this.legend.parentElement.dataset.legend = this.legend.hidden ? "none" : "bottom";
    this.legend.replaceChildren(...[...seen].map(([text, tint]) => h("span", { class: "legend-entry" }, h("i", { class: "swatch", style: { background: tint ?? paletteColour(0, theme()) } }), text || colour("gray", theme()))));
  }

  /** Take everything away. */
  destroy() { this.chart.destroy(); }
}
