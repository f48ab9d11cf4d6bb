/** Lines, steps, bars and points over time. Rule: no line is drawn across a gap in the samples. */

import { Chart } from "./chart.js";
import { colour, faded } from "./colours.js";
import { h } from "./dom.js";
import { display, seriesColour, thresholdLines } from "./fields.js";
import { displayName, numbers } from "./frames.js";
import { drawLegend } from "./legend.js";
import { theme, token } from "./theme.js";
import { format, linearTicks, logTicks } from "./units.js";

const SHAPES = { linear: "linear", smooth: "spline", stepBefore: "vh", stepAfter: "hv" };
const DASHES = { dash: "dash", dot: "dot", solid: "solid" };

/** Find the value of a series at a time: its last sample not after it, unless a gap lies between. */
export function valueAt(times, values, at, stepMs) {
  let [low, high] = [0, times.length - 1];
  if (high < 0) return null;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (times[middle] <= at + stepMs / 2) low = middle;
    else high = middle - 1;
  }
  return Math.abs(times[low] - at) <= stepMs * 1.5 ? values[low] : null;
}

/** Put gaps in: a sample further than `limit` ms from the one before starts a new line. */
export function withGaps(times, values, limit) {
  const [x, y] = [[], []];
  let before = null;
  for (let index = 0; index < times.length; index += 1) {
    if (before !== null && times[index] - before > limit) { x.push(before + 1); y.push(null); }
    x.push(times[index]);
    y.push(values[index]);
    before = times[index];
  }
  return { x, y };
}

/** Running sums of series on one grid of times: where none has a sample there is a gap, else a missing one counts 0. */
export function stack(list, share = false) {
  const grid = [...new Set(list.flatMap(({ times }) => times))].sort((one, two) => one - two);
  const lookups = list.map(({ times, values }) => new Map(times.map((at, index) => [at, values[index]])));
  const totals = grid.map((at) => lookups.reduce((sum, each) => sum + (each.get(at) ?? 0), 0));
  const running = new Array(grid.length).fill(0);
  return lookups.map((each) => ({
    x: grid,
    y: grid.map((at, index) => {
      if (lookups.every((other) => (other.get(at) ?? null) === null)) return null;
      running[index] += each.get(at) ?? 0;
      return share ? (totals[index] ? running[index] / totals[index] : 0) : running[index];
    }),
  }));
}

function alone(y) {
  return y.map((value, index) => (value !== null && (y[index - 1] ?? null) === null && (y[index + 1] ?? null) === null ? 6 : 0));
}

// #rrggbb of a colour on the panel's ground: opaque, so that stacked areas do not shine through each other.
function onGround(hex, opacity) {
  const parts = (each) => [1, 3, 5].map((at) => parseInt(each.slice(at, at + 2), 16));
  const ground = token("--panel");
  if (!/^#[0-9a-f]{6}$/i.test(hex) || !/^#[0-9a-f]{6}$/i.test(ground)) return hex;
  const [one, two] = [parts(hex), parts(ground)];
  return `rgb(${one.map((part, index) => Math.round(part * opacity + two[index] * (1 - opacity))).join(",")})`;
}

function tracesOf(series, stepMs) {
  const traces = [];
  const groups = new Map();
  for (const each of series) {
    const { mode = "none", group = "A" } = each.custom.stacking ?? {};
    if (mode === "none" || each.custom.drawStyle === "bars" || each.custom.drawStyle === "points") continue;
    const key = `${each.axis} ${group} ${mode}`;
    groups.set(key, [...(groups.get(key) ?? []), each]);
  }
  for (const [key, members] of groups) stack(members, key.endsWith("percent")).forEach((sums, index) => Object.assign(members[index], { sums, stacked: true }));
  for (const each of series) {
    const { custom, colour: tint } = each;
    const style = custom.drawStyle ?? "line";
    const limit = typeof custom.spanNulls === "number" ? custom.spanNulls : stepMs * 1.5;
    const { x, y } = each.sums ?? (custom.spanNulls === true ? { x: each.times, y: each.values } : withGaps(each.times, each.values, limit));
    each.drawn = { x, y };
    const fill = (custom.fillOpacity ?? 0) / 100;
    const common = { x, y, name: each.name, yaxis: each.axis, hoverinfo: "skip", cliponaxis: true };
    if (style === "bars") {
      traces.push({ ...common, type: "bar", width: stepMs * 0.92, marker: { color: faded(tint, Math.max(fill, 0.15)), line: { color: tint, width: custom.lineWidth ?? 1 } } });
      continue;
    }
    const shape = SHAPES[custom.lineInterpolation] ?? "linear";
    const width = custom.lineWidth ?? 1.5;
    const points = style === "points" || custom.showPoints === "always";
    const singles = points ? [] : alone(y);
    traces.push({
      ...common,
      type: "scatter",
      mode: style === "points" || width === 0 && points ? "markers" : points || singles.some(Boolean) ? "lines+markers" : "lines",
      line: { color: tint, width, shape, dash: DASHES[custom.lineStyle?.fill] ?? "solid" },
      marker: { color: tint, size: points ? custom.pointSize ?? 5 : singles, line: { width: 0 } },
      connectgaps: custom.spanNulls === true,
      fill: fill > 0 ? "tozeroy" : "none",
      fillcolor: each.stacked ? onGround(tint, Math.max(fill, 0.25)) : faded(tint, fill),
    });
  }
  // Stacked areas are painted from the top sum down, each over the one behind it.
  const order = traces.map((_, index) => index).sort((one, two) => (series[one].stacked && series[two].stacked ? two - one : 0));
  return order.map((index) => traces[index]);
}

// A bar of barAlignment -1 ends at its sample, 1 begins there: where its middle is, from the sample, in steps.
const middleOf = (custom) => (custom.drawStyle === "bars" ? (custom.barAlignment ?? 0) / 2 : 0);

/** How high the bars of each time are that stand on each other. */
export function piled(series) {
  const totals = new Map();
  for (const { custom, drawn } of series) {
    if (custom.drawStyle !== "bars" || (custom.stacking?.mode ?? "none") === "none") continue;
    drawn.y.forEach((value, index) => { if (value > 0) totals.set(+drawn.x[index], (totals.get(+drawn.x[index]) ?? 0) + value); });
  }
  return [...totals.values()];
}

function axisOf(series, height, extra = []) {
  const fields = series.map(({ field }) => field.config);
  const first = fields[0] ?? {};
  const custom = first.custom ?? {};
  const unit = first.unit;
  const percent = series.some((each) => each.custom.stacking?.mode === "percent");
  let [low, high] = [Infinity, -Infinity];
  for (const { drawn } of series) for (const value of drawn.y) if (value !== null && Number.isFinite(value)) { if (value < low) low = value; if (value > high) high = value; }
  for (const total of piled(series)) high = Math.max(high, total);
  for (const value of extra) if (value <= high * 1.5) high = Math.max(high, value);
  const most = Math.max(2, Math.floor(height / 38));
  const shown = percent ? "percentunit" : unit;
  if (custom.scaleDistribution?.type === "log") {
    const base = custom.scaleDistribution.log ?? 10;
    let least = Infinity;
    for (const { drawn } of series) for (const value of drawn.y) if (value > 0 && value < least) least = value;
    if (!Number.isFinite(least)) [least, high] = [0.1, 10];
    else for (const value of [...extra, custom.axisSoftMin, custom.axisSoftMax]) { if (value > 0 && value < least) least = value; if (value > high) high = value; }
    return { ...logTicks(first.min > 0 ? first.min : least, first.max ?? high, shown, most, base), log: true, title: custom.axisLabel };
  }
  if (!Number.isFinite(low)) [low, high] = [0, 1];
  const filled = series.some(({ custom: each, stacked }) => stacked || (each.fillOpacity ?? 0) > 0 || each.drawStyle === "bars");
  if (low > 0 && (filled || low < (high - low) * 2)) low = 0;
  low = Math.min(low, custom.axisSoftMin ?? Infinity);
  high = Math.max(high, custom.axisSoftMax ?? -Infinity);
  if (custom.axisCenteredZero) [low, high] = [-Math.max(Math.abs(low), Math.abs(high)), Math.max(Math.abs(low), Math.abs(high))];
  const fixedLow = typeof first.min === "number";
  const fixedHigh = typeof first.max === "number";
  const values = series.flatMap(({ drawn }) => drawn.y).filter((value) => value !== null);
  const whole = (unit === undefined || unit === "none" || unit === "short") && first.decimals === 0 || values.every(Number.isInteger) && high < 10;
  return { ...linearTicks(fixedLow ? first.min : low, fixedHigh ? first.max : high, shown, most, { decimals: first.decimals, fixedLow, fixedHigh, whole }), title: custom.axisLabel };
}

function thresholdShapes(config, axis, yref) {
  const mode = config.custom?.thresholdsStyle?.mode ?? "off";
  if (mode === "off") return [];
  const steps = thresholdLines(config).filter(({ value }) => value > axis.low && value < axis.high);
  const lines = mode === "area" ? [] : steps.map(({ value, color }) => ({ type: "line", xref: "paper", yref, x0: 0, x1: 1, y0: value, y1: value, line: { color: colour(color, theme()), width: 1.5, dash: /dash/.test(mode) ? "dash" : "solid" }, layer: "above" }));
  if (!/area/.test(mode)) return lines;
  return [...lines, ...steps.map(({ value, color }, index) => ({ type: "rect", xref: "paper", yref, x0: 0, x1: 1, y0: value, y1: steps[index + 1]?.value ?? axis.high, fillcolor: colour(color, theme()), opacity: 0.1, line: { width: 0 }, layer: "below" }))];
}

/** Draws a `timeseries` panel in its body. */
export class TimeSeries {
  constructor(body, room) {
    this.hidden = new Set();
    this.holder = h("div", { class: "chart-holder" });
    this.legend = h("div", { class: "legend" });
    body.append(this.holder, this.legend);
    this.chart = new Chart(this.holder, room);
    this.room = room;
  }

  /** Draw what was asked; see panel.js. Returns what was drawn. */
  draw(view) {
    this.view = view;
    const { panel, frames, range, stepMs, marks, exemplars } = view;
    let series = numbers(frames).map(({ frame, field, times }, index) => ({
      frame, field, times: middleOf(field.config.custom ?? {}) ? times.map((at) => at + middleOf(field.config.custom) * stepMs) : times, values: field.values, name: displayName(field, frame, { single: true }), custom: field.config.custom ?? {}, colour: seriesColour(field, index, theme()), index,
    })).filter(({ custom }) => !(custom.hideFrom?.viz));
    const same = new Map();
    for (const each of series) { const n = (same.get(each.name) ?? 0) + 1; same.set(each.name, n); each.id = n > 1 ? `${each.name} ${n}` : each.name; }
    const unit = series[0]?.field.config.unit;
    for (const each of series) each.axis = each.custom.axisPlacement === "right" || each.field.config.unit !== unit && each.custom.axisPlacement !== "left" ? "y2" : "y";
    if (series.every(({ axis }) => axis === "y2")) for (const each of series) each.axis = "y";
    const all = series;
    series = series.filter(({ id }) => !this.hidden.has(id));
    drawLegend(this.legend, panel.options?.legend, all, this.hidden, () => this.draw(this.view));
    const traces = tracesOf(series, stepMs);
    const height = this.chart.box.clientHeight - 36;
    const [left, right] = ["y", "y2"].map((axis) => series.filter((each) => each.axis === axis));
    const y = axisOf(left, height, exemplars.map(({ value }) => value));
    const flat = series.length > 0 && series.every(({ values }) => values.every((value) => value === null || value === 0));
    const y2 = right.length ? axisOf(right, height) : undefined;
    const shapes = [...(left[0] ? thresholdShapes(left[0].field.config, y, "y") : []), ...(right[0] ? thresholdShapes(right[0].field.config, y2, "y2") : [])];
    const stacked = series.some((each) => each.custom.drawStyle === "bars" && (each.custom.stacking?.mode ?? "none") !== "none");
    this.chart.draw({
      traces, x: range, y, y2, shapes, marks, step: stepMs, layout: { barmode: stacked ? "stack" : "overlay", bargap: 0 },
      exemplars: exemplars.map((each) => ({ ...each, label: `${format(each.value, left[0]?.field.config.unit)} ${each.about}` })).filter(({ value }) => !y.log || value > 0),
      words: flat ? "0 all along" : "",
      label: `${panel.title}: ${all.length} series over time${flat ? ", 0 all along" : ""}. Arrow keys move the cursor.`,
      tooltip: (x) => this.#tell(x, series, stepMs),
    });
    return { series: all.length, points: all.reduce((sum, { values }) => sum + values.filter((value) => value !== null).length, 0) };
  }

  #tell(x, series, stepMs) {
    const rows = series.map((each) => ({ each, value: valueAt(each.times, each.values, x, stepMs) })).filter(({ value }) => value !== null && value !== undefined);
    if (!rows.length) return null;
    if ((this.view.panel.options?.tooltip?.sort ?? "none") !== "none") rows.sort((one, two) => (this.view.panel.options.tooltip.sort === "desc" ? two.value - one.value : one.value - two.value));
    const bar = rows[0].each.custom.drawStyle === "bars";
    const nearest = bar ? rows[0].each.times.reduce((best, at) => (Math.abs(at - x) < Math.abs(best - x) ? at : best)) : Math.round(x / stepMs) * stepMs;
    return {
      time: bar ? nearest - stepMs / 2 : nearest,
      until: bar ? nearest + stepMs / 2 : undefined,
      rows: rows.slice(0, 20).map(({ each, value }) => h("div", { class: "tip-row" }, h("i", { class: "swatch", style: { background: each.colour } }), h("span", {}, each.name), h("b", {}, display(value, each.field.config, theme()).text)))
        .concat(rows.length > 20 ? [h("div", { class: "tip-row" }, `and ${rows.length - 20} more`)] : []),
    };
  }

  /** Take everything away. */
  destroy() { this.chart.destroy(); }
}
