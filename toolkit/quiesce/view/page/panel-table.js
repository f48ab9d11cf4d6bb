/** Rows and columns; a press on a column's name sorts by it. */

import { faded, readableOn } from "./colours.js";
import { h, link } from "./dom.js";
import { cellText, display } from "./fields.js";
import { displayName, length } from "./frames.js";
import { fieldLinks } from "./links.js";
import { theme } from "./theme.js";
import { order } from "./transforms.js";

const MOST_ROWS = 500;

/** Several frames of series as one table: a row each. */
export function asTable(frames) {
  if (frames.length < 2) return frames[0] ?? { fields: [] };
  const names = [...new Set(frames.flatMap((frame) => frame.fields.map((field) => field.name)))];
  const first = (name) => frames.flatMap((frame) => frame.fields).find((field) => field.name === name);
  return {
    refId: frames[0].refId,
    name: frames[0].name,
    fields: names.map((name) => ({ ...first(name), values: frames.flatMap((frame) => frame.fields.find((field) => field.name === name)?.values ?? new Array(length(frame)).fill(null)) })),
  };
}

/** Draws a `table` panel in its body. */
export class Table {
  constructor(body) {
    this.box = h("div", { class: "table-holder", tabindex: "0", role: "region" });
    body.append(this.box);
    this.sort = null;
  }

  /** Draw what was asked; see panel.js. Returns what was drawn. */
  draw(view) {
    this.view = view;
    const { panel, frames, now, variables, range } = view;
    const frame = asTable(frames);
    const columns = frame.fields.filter((field) => !(field.config.custom?.hidden || field.config.custom?.hideFrom?.viz));
    const names = columns.map((field) => displayName(field, frame));
    const given = panel.options?.sortBy?.[0];
    const sort = this.sort ?? (given && { name: given.displayName, desc: Boolean(given.desc) });
    const key = sort ? columns[names.indexOf(sort.name)] ?? frame.fields.find((field) => field.name === sort.name) : null;
    let rows = key ? order(key.values, sort.desc) : [...Array(length(frame)).keys()];
    const total = rows.length;
    rows = rows.slice(0, MOST_ROWS);
    const focused = document.activeElement?.closest?.(".table-holder") === this.box ? document.activeElement.dataset.column : null;
    this.box.setAttribute("aria-label", `${panel.title}, ${total} rows`);
    this.box.replaceChildren(total ? h("table", { class: "grid-table" },
      panel.options?.showHeader === false ? null : h("thead", {}, h("tr", {}, ...columns.map((field, index) => this.#header(field, names[index], sort)))),
      h("tbody", {}, ...rows.map((row) => h("tr", {}, ...columns.map((field) => this.#cell(field, frame, row, { now, variables, range })))))) : h("p", { class: "quiet" }, view.empty.noValue ?? "No rows."),
    total > MOST_ROWS ? h("p", { class: "quiet" }, `${total - MOST_ROWS} more rows are not shown.`) : "");
    if (focused) [...this.box.querySelectorAll("th button")].find((each) => each.dataset.column === focused)?.focus();
    return { series: columns.length, points: total, drawn: true };
  }

  #header(field, name, sort) {
    const sorted = sort?.name === name ? (sort.desc ? "descending" : "ascending") : "none";
    const press = () => {
      this.sort = sorted === "descending" ? { name, desc: false } : sorted === "ascending" && this.sort ? { name, desc: true } : { name, desc: sorted === "ascending" };
      this.draw(this.view);
    };
    const right = field.type === "number" && !field.config.mappings?.length;
    return h("th", { scope: "col", "aria-sort": sorted, class: right ? "right" : "", style: { width: field.config.custom?.width ? `${field.config.custom.width}px` : "" } },
      h("button", { type: "button", data: { column: name }, onclick: press }, name, h("span", { "aria-hidden": "true" }, sorted === "none" ? "" : sorted === "ascending" ? " ↑" : " ↓")));
  }

  #cell(field, frame, row, { now, variables, range }) {
    const value = field.values[row];
    const shown = display(value, field.config, theme(), { now });
    const text = field.type === "number" || shown.mapped ? shown.text : value === null || value === "" ? shown.missing ? "" : shown.text : cellText(field, value, theme(), now);
    const type = field.config.custom?.cellOptions?.type ?? field.config.custom?.displayMode ?? "auto";
    const context = { value, text, labels: field.labels, variables, range, row: Object.fromEntries(frame.fields.flatMap((each) => [[each.name, each.values[row]], [displayName(each, frame), each.values[row]]])) };
    const links = fieldLinks(field, context);
    const painted = shown.colourName && shown.colourName !== "transparent" && value !== null;
    const style = {};
    let chip = null;
    if (painted && /background/.test(type)) chip = { background: shown.colour, color: readableOn(shown.colour) };
    else if (painted && (type === "color-text" || shown.mapped)) style.color = shown.colour;
    const content = links.length ? h("span", { class: "cell-links" }, ...links.map(({ title, href }, index) => link(href, { title }, index === 0 ? text : title))) : text;
    return h("td", { class: field.type === "number" && !field.config.mappings?.length ? "right" : "", style, data: { value: value ?? "", colour: painted ? shown.colourName : "" } },
      chip ? h("span", { class: "chip", style: chip }, content) : type === "gauge" && typeof value === "number" && field.config.max ? gauge(value, field.config, shown, content) : content);
  }

  /** Nothing to take away. */
  destroy() {}
}

function gauge(value, config, shown, content) {
  const share = Math.max(0, Math.min(1, (value - (config.min ?? 0)) / (config.max - (config.min ?? 0))));
  return h("span", { class: "gauge", style: { backgroundImage: `linear-gradient(90deg, ${faded(shown.colour, 0.35)} ${share * 100}%, transparent 0)` } }, content);
}
