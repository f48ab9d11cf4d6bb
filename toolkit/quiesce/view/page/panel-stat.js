/** One big number, or a few, with the colour that its threshold or its state gives it. */

import { colour, faded, readableOn } from "./colours.js";
import { h, link, svg } from "./dom.js";
import { display } from "./fields.js";
import { displayName, numbers } from "./frames.js";
import { reduce } from "./reduce.js";
import { fieldLinks } from "./links.js";
import { theme } from "./theme.js";

function wanted(fields, options) {
  const pattern = options.reduceOptions?.fields;
  if (!pattern) return fields;
  const regex = /^\/(.*)\/([a-z]*)$/.exec(pattern);
  const test = regex ? new RegExp(regex[1], regex[2]) : null;
  const found = fields.filter(({ field, frame }) => (test ? test.test(field.name) || test.test(displayName(field, frame)) : field.name === pattern || displayName(field, frame) === pattern));
  return found.length ? found : fields;
}

/** What a stat panel shows: {name, raw, field, values, times, index}. */
export function stats(frames, options = {}) {
  const { calcs = ["lastNotNull"], values: every = false, limit = 25 } = options.reduceOptions ?? {};
  const fields = wanted(numbers(frames), options);
  if (every) {
    return fields.flatMap(({ frame, field }) => {
      const names = frame.fields.filter((each) => each.type === "string");
      return field.values.slice(0, limit).map((raw, row) => ({ name: names.map((each) => each.values[row]).join(" ") || displayName(field, frame, { single: true }), raw, field, values: [raw], times: [], index: row }));
    });
  }
  return fields.flatMap(({ frame, field, times }, index) => {
    if (!field.values.length) return [];
    return calcs.map((calc) => ({ name: displayName(field, frame, { single: true }), raw: reduce(field.values, calc), field, values: field.values, times, index }));
  });
}

function sparkline({ times, values }, range, tint) {
  const points = times.map((at, index) => [at, values[index]]).filter(([, value]) => value === null || Number.isFinite(value));
  const numbersOnly = points.map(([, value]) => value).filter((value) => value !== null);
  if (numbersOnly.length < 2) return null;
  const low = Math.min(...numbersOnly);
  const high = Math.max(...numbersOnly);
  const x = (at) => ((at - range.from) / (range.to - range.from)) * 100;
  const y = (value) => (high > low ? 36 - ((value - low) / (high - low)) * 32 : 20);
  const runs = [];
  for (const [at, value] of points) {
    if (value === null) { runs.push([]); continue; }
    if (!runs.length) runs.push([]);
    runs.at(-1).push(`${x(at).toFixed(2)},${y(value).toFixed(2)}`);
  }
  const lines = runs.filter((run) => run.length > 1);
  return svg("svg", { class: "spark", viewBox: "0 0 100 40", preserveAspectRatio: "none", "aria-hidden": "true" },
    ...lines.map((run) => svg("polygon", { points: `${run[0].split(",")[0]},40 ${run.join(" ")} ${run.at(-1).split(",")[0]},40`, fill: tint, "fill-opacity": "0.14" })),
    ...lines.map((run) => svg("polyline", { points: run.join(" "), fill: "none", stroke: tint, "stroke-width": "1.5", "vector-effect": "non-scaling-stroke" })));
}

/** Draws a `stat` panel in its body. */
export class Stat {
  constructor(body) {
    this.box = h("div", { class: "stats" });
    body.append(this.box);
  }

  /** Draw what was asked; see panel.js. Returns what was drawn. */
  draw({ panel, frames, range, now, variables, empty }) {
    const options = panel.options ?? {};
    const { colorMode = "value", graphMode = "none", textMode = "auto", orientation = "auto", justifyMode = "auto" } = options;
    let shown = stats(frames, options);
    if (!shown.length && empty.noValue !== undefined) shown = [{ name: panel.title, raw: null, field: { config: empty, labels: {}, name: "" }, values: [], times: [], index: 0, nameless: true }];
    this.box.dataset.orientation = orientation;
    this.box.dataset.justify = justifyMode;
    this.box.dataset.many = shown.length > 1 ? "yes" : "no";
    this.box.replaceChildren(...shown.map((each) => {
      const { text, colour: mappedColour, colourName: name, missing } = display(each.raw, each.field.config, theme(), { now, index: each.index });
      const tint = missing && !name ? colour("gray", theme()) : name ? mappedColour : colour("text", theme());
      const ground = /^background/.test(colorMode) && !(missing && !name) && tint !== "transparent" ? tint : null;
      const front = ground ? readableOn(ground) : colorMode === "value" || missing ? tint : null;
      const named = textMode === "value_and_name" || textMode === "name" || (textMode === "auto" && shown.length > 1);
      const links = fieldLinks(each.field, { value: each.raw, text, labels: each.field.labels, variables, range });
      const content = [
        named && !each.nameless ? h("div", { class: "stat-name" }, each.name) : null,
        textMode === "name" || textMode === "none" ? null : h("div", { class: "stat-value", style: { color: front ?? "", "--length": String(Math.max(3, text.length)) } }, text),
      ];
      return h("div", { class: "stat", style: { background: ground ?? "", color: ground ? front : "" }, data: { value: each.raw ?? "", text, colour: name ?? "" } },
        graphMode === "area" ? sparkline(each, range, ground ? faded(readableOn(ground), 1) : tint) : null,
        links.length ? link(links[0].href, { class: "stat-text", title: links[0].title }, ...content) : h("div", { class: "stat-text" }, ...content));
    }));
    return { series: shown.length, points: shown.reduce((sum, { values }) => sum + values.length, 0), drawn: shown.length > 0 };
  }

  /** Nothing to take away. */
  destroy() {}
}
