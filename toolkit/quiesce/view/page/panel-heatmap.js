/** How often each bucket of a histogram was hit, over time. Rule: an empty cell is not drawn. */

import { Chart } from "./chart.js";
import { colour, heatScale } from "./colours.js";
import { h } from "./dom.js";
import { buckets, sample } from "./frames.js";
import { theme } from "./theme.js";
import { format } from "./units.js";

/** The place of a value on an axis of buckets: bucket n reaches from n - 0.5 to n + 0.5. */
export function placeOf(value, bounds) {
  const upper = bounds.findIndex((bound) => value <= sample(bound));
  if (upper < 0) return bounds.length - 0.5;
  const low = upper ? sample(bounds[upper - 1]) : 0;
  const high = sample(bounds[upper]);
  if (!Number.isFinite(high)) return upper;
  // Buckets grow by factors, so inside of one a value lies by its logarithm.
  const share = low > 0 ? Math.log(value / low) / Math.log(high / low) : value / high;
  return upper - 0.5 + Math.max(0, Math.min(1, share));
}

const LEAST = 1e-6; // what sums of many series differ by without a count between them

/** Leave out buckets above and below all that were hit, but for one on each side. */
export function trimmed({ bounds, times, counts }, values = []) {
  const hit = counts.map((row) => row.some((count) => count > LEAST));
  for (const value of values) { const at = Math.round(placeOf(value, bounds)); if (at < hit.length && at >= 0) hit[at] = true; }
  const [first, last] = [hit.indexOf(true), hit.lastIndexOf(true)];
  if (first < 0) return { bounds, times, counts, first: 0 };
  const [from, to] = [Math.max(0, first - 1), Math.min(bounds.length, last + 2)];
  return { bounds: bounds.slice(from, to), times, counts: counts.slice(from, to), first: from };
}

/** Draws a `heatmap` panel in its body. */
export class Heatmap {
  constructor(body, room) {
    this.holder = h("div", { class: "chart-holder" });
    this.legend = h("div", { class: "legend heat-legend" });
    body.append(this.holder, this.legend);
    this.chart = new Chart(this.holder, room);
  }

  /** Draw what was asked; see panel.js. Returns what was drawn. */
  draw({ panel, frames, range, stepMs, marks, exemplars }) {
    const all = buckets(frames);
    const shown = trimmed(all, exemplars.map(({ value }) => value));
    const { bounds, times, counts, first } = shown;
    const options = panel.options ?? {};
    const unit = options.yAxis?.unit ?? panel.fieldConfig?.defaults?.unit ?? "s";
    const most = Math.max(0, ...counts.flat().filter(Number.isFinite));
    const exponent = options.color?.scale === "linear" ? 1 : options.color?.exponent ?? 0.5;
    const grid = withoutGaps(times, counts, stepMs);
    // A column holds what came since the one before, so it ends at its sample.
    grid.times = grid.times.map((at) => at - stepMs / 2);
    const text = (bound) => (bound === "+Inf" ? "∞" : `≤ ${format(sample(bound), unit).replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "")}`);
    const height = this.chart.box.clientHeight - 36;
    const every = Math.max(1, Math.ceil(bounds.length / Math.max(2, Math.floor(height / 16))));
    const labelled = bounds.map((_, index) => index).filter((index) => index % every === 0 || bounds[index] === "+Inf");
    const scale = heatScale(theme());
    this.chart.draw({
      traces: [{ type: "heatmap", x: grid.times, y: bounds.map((_, index) => index), z: grid.counts.map((row) => row.map((count) => (count > LEAST ? (count / most) ** exponent : null))), zmin: 0, zmax: 1, colorscale: scale, showscale: false, hoverinfo: "skip", xgap: 0, ygap: 1, hoverongaps: false }],
      x: range, y: { low: -0.5, high: bounds.length - 0.5, values: labelled, texts: labelled.map((index) => text(bounds[index])), noGrid: false }, marks, step: stepMs,
      exemplars: exemplars.map((each) => ({ ...each, value: placeOf(each.value, all.bounds) - first, label: `${format(each.value, unit)} ${each.about}`, colour: colour("orange", theme()) })),
      label: `${panel.title}: heatmap of ${bounds.length} buckets over time, up to ${format(most, "short")} in a cell`,
      tooltip: (x, part) => {
        const at = grid.times.findIndex((time) => Math.abs(time - x) <= stepMs / 2);
        const index = Math.round(part * bounds.length - 0.5);
        const count = at >= 0 ? grid.counts[index]?.[at] : null;
        if (!(count > LEAST)) return null;
        return { time: grid.times[at] - stepMs / 2, until: grid.times[at] + stepMs / 2, rows: [h("div", { class: "tip-row" }, h("i", { class: "swatch", style: { background: tint(scale, (count / most) ** exponent) } }), h("span", {}, text(bounds[index])), h("b", {}, format(Number(count.toPrecision(3)), "short")))] };
      },
    });
    this.legend.hidden = !most || options.legend?.show === false;
    this.legend.parentElement.dataset.legend = this.legend.hidden ? "none" : "bottom";
    this.legend.replaceChildren(h("span", {}, "0"), h("span", { class: "heat-scale", style: { background: `linear-gradient(90deg, ${scale.map(([, hex]) => hex).join(",")})` } }), h("span", {}, format(Number(most.toPrecision(2)), "short")), exemplars.length ? h("span", { class: "exemplar-key" }, `${exemplars.length} exemplars: press one to open its trace`) : "");
    return { series: bounds.length, points: counts.flat().filter((count) => count > LEAST).length, drawn: all.bounds.length > 0 };
  }

  /** Take everything away. */
  destroy() { this.chart.destroy(); }
}

function tint(scale, share) {
  return scale[Math.min(scale.length - 1, Math.round(share * (scale.length - 1)))][1];
}

// Plotly stretches a cell to its neighbours: a column of nothing at each step that has no samples keeps cells narrow.
function withoutGaps(times, counts, stepMs) {
  if (times.length < 1) return { times, counts };
  const full = [];
  for (let at = times[0]; at <= times.at(-1) + 1; at += stepMs) full.push(Math.round(at));
  if (full.length === 1) full.push(full[0] + stepMs);
  const place = new Map(times.map((at, index) => [at, index]));
  return { times: full, counts: counts.map((row) => full.map((at) => (place.has(at) ? row[place.get(at)] : null))) };
}
