/**
 * A panel: its frame, its queries, its state. Rules: it asks only while it is in view; a new question gives up the one
 * before; what went wrong is said in the panel, with the query; what is drawn stays until something newer is there.
 *
 * What a panel shows can be read back from its element: data-state (idle, loading, drawn, empty, error), data-series,
 * data-points, data-exemplars, data-drawn-at.
 */

import { thin } from "./annotations.js";
import { colour } from "./colours.js";
import { h } from "./dom.js";
import { chosen, read } from "./exemplars.js";
import { configure, cellText } from "./fields.js";
import { displayName, length, numbers, toFrames } from "./frames.js";
import { inspect } from "./inspect.js";
import { builtins, timing } from "./intervals.js";
import { interpolate, interpolateText } from "./interpolate.js";
import { fillAddress } from "./links.js";
import { markdown } from "./markdown.js";
import { Heatmap } from "./panel-heatmap.js";
import { StateTimeline } from "./panel-state-timeline.js";
import { Stat } from "./panel-stat.js";
import { Table } from "./panel-table.js";
import { Text } from "./panel-text.js";
import { TimeSeries } from "./panel-timeseries.js";
import { isOutdated } from "./requests.js";
import { theme } from "./theme.js";
import { transform } from "./transforms.js";
import { violationsAddress } from "./violations.js";

const TYPES = { timeseries: TimeSeries, stat: Stat, table: Table, "state-timeline": StateTimeline, heatmap: Heatmap, text: Text };

/** Panel types that the page draws. */
export const DRAWN_TYPES = Object.keys(TYPES);

let popovers = 0;

/** One panel of a dashboard. `board` is what the dashboard shares: see dashboard.js. */
export class Panel {
  constructor(json, board) {
    this.json = json;
    this.board = board;
    this.visible = false;
    this.dirty = true;
    this.stopper = null;
    this.queries = [];
    this.last = null;
    this.frames = [];
    this.body = h("div", { class: "panel-body" });
    this.note = h("div", { class: "panel-note", role: "status", hidden: true });
    this.spin = h("span", { class: "spin", "aria-hidden": "true" });
    const id = `about-${(popovers += 1)}`;
    const title = `title-${popovers}`;
    const about = json.description ? h("div", { id, class: "about", popover: "auto" }, h("strong", {}, json.title), ...markdown(json.description, (url) => fillAddress(url, board.context()))) : null;
    const info = about ? h("button", { type: "button", class: "icon", popovertarget: id, "aria-label": `About ${json.title}`, title: "What this panel shows, and what good looks like" }, "i") : null;
    if (info) this.#hover(info, about);
    this.heading = h("h3", { id: title }, json.title ?? "");
    this.element = h("section", { class: `panel panel-${json.type}${json.transparent ? " transparent" : ""}`, "aria-labelledby": title, data: { panelId: json.id, type: json.type, state: "idle", title: json.title ?? "" } },
      h("header", { class: "panel-head" }, this.heading, this.spin, info, h("span", { class: "panel-links" }), h("button", { type: "button", class: "icon menu", "aria-label": `Data and queries of ${json.title}`, title: "Data and queries", onclick: () => inspect(this) }, "⋯")),
      this.body, this.note, about);
    const Type = TYPES[json.type];
    if (json.repeat) this.#say("error", `this panel repeats for each value of $${json.repeat}, which this page cannot do`, "Grafana draws it; here it would show the values as one.");
    else if (Type) this.drawing = new Type(this.body, board.room);
    else this.#say("error", `the panel type "${json.type}" is not known to this page`);
  }

  #hover(button, about) {
    const place = () => {
      const at = button.getBoundingClientRect();
      about.style.left = `${Math.max(8, Math.min(at.left - 40, innerWidth - 388))}px`;
      const below = at.bottom + 6;
      about.style.top = `${below}px`;
      requestAnimationFrame(() => { if (below + about.offsetHeight > innerHeight - 8) about.style.top = `${Math.max(8, at.top - about.offsetHeight - 6)}px`; });
    };
    about.addEventListener("beforetoggle", place);
    let timer = null;
    button.addEventListener("pointerenter", () => { timer = setTimeout(() => about.showPopover?.(), 250); });
    button.addEventListener("pointerleave", () => { clearTimeout(timer); if (about.matches(":popover-open") && !about.matches(":hover")) about.hidePopover(); });
  }

  /** Told by the dashboard when the panel comes into view or leaves it. */
  see(visible) {
    if (visible === this.visible) return;
    this.visible = visible;
    if (!visible) { if (this.stopper) { this.stop(); this.dirty = true; } } else if (this.dirty) this.refresh();
  }

  /** Give up what is under way. */
  stop() {
    this.stopper?.abort();
    this.stopper = null;
    this.spin.classList.remove("on");
  }

  /** Ask again, now if in view, else once it is. */
  refresh() {
    this.dirty = true;
    if (!this.visible || !this.drawing || !this.board.ready) return Promise.resolve();
    this.stop();
    this.dirty = false;
    const stopper = new AbortController();
    this.stopper = stopper;
    this.spin.classList.add("on");
    if (!this.last) this.element.dataset.state = "loading";
    return this.#load(stopper.signal).catch((error) => {
      if (isOutdated(error)) return;
      this.#fail(error);
    }).finally(() => {
      if (this.stopper !== stopper) return;
      this.stopper = null;
      this.spin.classList.remove("on");
    });
  }

  async #load(signal) {
    const { board, json } = this;
    const range = board.range();
    const targets = (json.targets ?? []).filter((target) => !target.hide && target.expr);
    const pixels = this.body.clientWidth || 500;
    this.queries = targets.map((target) => {
      const at = timing({ range, pixels, scrapeMs: board.scrapeMs, panel: json, target });
      return { target, at, expr: interpolate(target.expr, { ...board.variables, ...builtins(range, at) }) };
    });
    const answers = await Promise.all(this.queries.map((query) => this.#ask(query, range, targets.length > 1, signal)));
    const frames = transform(configure(answers.flatMap(({ frames: each }) => each), {}), json.transformations ?? []);
    configure(frames, json.fieldConfig);
    for (const field of frames.flatMap((frame) => frame.fields)) if (field.config.displayName) field.config.displayName = this.#fieldName(field);
    const exemplars = answers.flatMap(({ exemplars: each }) => each);
    const steps = this.queries.map(({ at }) => at.step);
    this.last = { frames, exemplars, range: { ...range }, stepMs: steps.length ? Math.max(...steps) : 1000, at: Date.now() };
    this.draw();
  }

  #fieldName(field) {
    return interpolateText(field.config.displayName, this.board.variables, (name, path) => (name === "__field" && path?.startsWith("labels.") ? field.labels[path.slice(7)] ?? "" : undefined));
  }

  async #ask({ target, at, expr }, range, several, signal) {
    const { server, variables } = this.board;
    const instant = target.instant && !target.range;
    const end = String(instant ? range.to / 1000 : at.end / 1000);
    const parameters = instant ? { query: expr, time: end } : { query: expr, start: String(at.start / 1000), end, step: String(at.step / 1000) };
    const [data, exemplars] = await Promise.all([
      server.prometheus(instant ? "query" : "query_range", parameters, { signal }).catch((error) => { error.query = expr; throw error; }),
      target.exemplar && !instant
        ? server.prometheus("query_exemplars", { query: expr, start: String(range.from / 1000), end: String(range.to / 1000) }, { signal }).catch((error) => { if (isOutdated(error)) throw error; return []; })
        : [],
    ]);
    return { frames: toFrames(target, data, { stepMs: at.step, variables: { ...variables, ...builtins(range, at) }, several }), exemplars: chosen(read(exemplars, colour("orange", theme())), range) };
  }

  /** Draw what is there: after an answer, a change of theme or of events. */
  draw() {
    const { json, board, last } = this;
    if (!last || !this.drawing) return;
    const perPixel = (last.range.to - last.range.from) / Math.max(100, this.body.clientWidth - 80);
    const marks = thin(board.events, 10 * perPixel).map((event) => ({ ...event, colour: colour(event.color, theme()) }));
    const empty = json.fieldConfig?.defaults ?? {};
    this.heading.textContent = interpolateText(json.title ?? "", board.variables);
    this.#links();
    const rows = last.frames.reduce((sum, frame) => sum + length(frame), 0);
    this.element.dataset.exemplars = String(last.exemplars.length);
    this.element.dataset.drawnAt = String(last.at);
    const counts = json.type === "heatmap" ? (value) => value > 0 : Number.isFinite;
    const nothing = ["timeseries", "state-timeline", "heatmap"].includes(json.type) && !numbers(last.frames).some(({ field }) => field.values.some(counts));
    if (rows && nothing) {
      this.body.hidden = true;
      this.#say("empty", "No data", this.#why("Nothing was measured in this time range."));
      Object.assign(this.element.dataset, { series: "0", points: "0" });
      return;
    }
    if (!rows && json.type !== "text" && json.type !== "table" && !(json.type === "stat" && empty.noValue !== undefined)) {
      this.body.hidden = true;
      this.#say("empty", "No data", this.#why("Nothing matched in this time range. The queries are under ⋯."));
      Object.assign(this.element.dataset, { series: "0", points: "0" });
      return;
    }
    this.body.hidden = false;
    try {
      const drawn = this.drawing.draw({ panel: json, frames: last.frames, exemplars: last.exemplars, marks, range: last.range, stepMs: last.stepMs, now: board.now(), variables: board.variables, empty });
      Object.assign(this.element.dataset, { series: String(drawn.series), points: String(drawn.points), ...(drawn.states ? { states: drawn.states } : {}) });
      this.note.hidden = true;
      this.element.dataset.state = "drawn";
    } catch (error) {
      this.#fail(error);
    }
  }

  /** Why a panel may rightly be empty, in its description's own words. */
  #why(otherwise) {
    const said = /\bEmpty: ([^.]+)\./.exec(this.json.description ?? "")?.[1];
    return said ? `${said[0].toUpperCase()}${said.slice(1)}.` : otherwise;
  }

  #links() {
    const holder = this.element.querySelector(".panel-links");
    const audited = this.json.type !== "stat" && (this.json.targets ?? []).some(({ expr }) => /quiesce_invariant_/.test(expr ?? ""));
    holder.replaceChildren(audited ? h("a", { href: violationsAddress() }, "Records with evidence") : "", ...(this.json.links ?? []).map(({ title, url }) => h("a", { href: fillAddress(url, this.board.context()), ...(this.json.type === "stat" ? { title: interpolateText(title, this.board.variables), "aria-label": interpolateText(title, this.board.variables) } : {}) }, this.json.type === "stat" ? "↗" : interpolateText(title, this.board.variables))));
  }

  #fail(error) {
    // While Prometheus is away the page says so once, in its banner; what was drawn stays, and is old.
    if (this.last && (error.kind === "prometheus" || error.kind === "server")) { this.dirty = true; return; }
    if (error.kind === "prometheus" || error.kind === "server") this.dirty = true;
    this.body.hidden = true;
    this.#say("error", error.message, error.query ?? this.queries.map(({ expr }) => expr).join("\n"));
  }

  #say(state, message, detail = "") {
    this.element.dataset.state = state;
    this.heading.textContent = interpolateText(this.json.title ?? "", this.board.variables ?? {});
    this.note.hidden = false;
    this.note.replaceChildren(h("strong", {}, message), state === "error" && detail ? h("pre", {}, detail) : h("span", {}, detail));
  }

  /** The data as text, for the inspector: {head, rows}. */
  table() {
    const frame = this.last?.frames ?? [];
    return frame.map((each) => ({
      head: each.fields.map((field) => displayName(field, each)),
      rows: [...Array(Math.min(length(each), 200)).keys()].map((at) => length(each) - 1 - at).map((row) => each.fields.map((field) => cellText(field, field.values[row], theme(), this.board.now()))),
    }));
  }

  /** Take everything away. */
  destroy() {
    this.stop();
    this.drawing?.destroy();
    this.element.remove();
  }
}
