/**
 * A chart with a time axis: Plotly draws the marks; axes, cursor, tooltip, exemplars and events are ours, so that they
 * speak local time and the panel's units, and work by keyboard.
 *
 * Rule: the plot's place inside its box is fixed before Plotly is asked, so pixels and times convert by one formula.
 */

import { h, roving } from "./dom.js";
import { clock, stamp, timeTicks } from "./timerange.js";
import { token } from "./theme.js";

const EDGE = { top: 10, bottom: 26, right: 14 };
const PIXELS_PER_TICK = 92;
const canvas = document.createElement("canvas").getContext("2d");

/** Pixels that a text takes on an axis. */
export function textWidth(text, size = 11) {
  canvas.font = `${size}px ${token("--font")}`;
  return canvas.measureText(text).width;
}

/** One chart in a container. `room` is what charts of a page share: {zoom, zoomOut, bus}. */
export class Chart {
  constructor(container, room) {
    this.room = room;
    this.plot = h("div", { class: "plot" });
    this.line = h("div", { class: "cursor", hidden: true });
    this.dots = new Map();
    this.decor = h("div", {});
    this.group = h("div", { class: "exemplars", role: "group", "aria-label": "exemplars" });
    roving(this.group, ".exemplar");
    this.over = h("div", { class: "over" }, this.decor, this.group);
    this.tip = h("div", { class: "tip", role: "status", hidden: true });
    this.box = h("div", { class: "chart", tabindex: "0", role: "group" }, this.plot, this.line, this.over, this.tip);
    container.append(this.box);
    this.down = false;
    this.pending = null;
    this.cursorX = null;
    this.#listen();
  }

  #listen() {
    const { box, room } = this;
    box.addEventListener("pointerdown", (event) => { if (event.target.closest(".plot")) { this.down = true; this.#hide(); } });
    this.release = () => { this.down = false; if (this.pending) setTimeout(() => this.pending && this.draw(this.pending), 0); };
    addEventListener("pointerup", this.release);
    box.addEventListener("pointermove", (event) => {
      const { left, top } = box.getBoundingClientRect();
      if (!this.down) this.#point(event.clientX - left, event.clientY - top);
    });
    box.addEventListener("pointerleave", () => this.#hide(true));
    box.addEventListener("blur", () => this.#hide(true));
    box.addEventListener("dblclick", (event) => { if (event.target.closest(".plot")) room.zoomOut(); });
    box.addEventListener("keydown", (event) => {
      if (event.target !== box || !this.now) return;
      const { from, to } = this.now.x;
      const step = (this.now.step ?? (to - from) / 100) * (event.shiftKey ? 10 : 1);
      if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
        event.preventDefault();
        const at = Math.max(from, Math.min(to, (this.cursorX ?? to) + (event.key === "ArrowLeft" ? -step : step)));
        this.#point(this.toPixel(at), this.size.height / 2);
      } else if (event.key === "Escape" && !this.tip.hidden) { event.stopPropagation(); this.#hide(true); }
      else if (event.key === "-") room.zoomOut();
    });
    this.follow = ({ detail: { x, source } }) => { if (source !== this) this.#cursor(x); };
    room.bus.addEventListener("cursor", this.follow);
    this.resize = new ResizeObserver(() => {
      const { clientWidth: width, clientHeight: height } = box;
      if (this.now && this.size && (Math.abs(width - this.size.width) > 1 || Math.abs(height - this.size.height) > 1)) this.draw(this.now);
    });
    this.resize.observe(box);
  }

  /** Pixel of a time, from the box's left edge. */
  toPixel(at) {
    const { from, to } = this.now.x;
    return this.inner.left + ((at - from) / (to - from)) * this.inner.width;
  }

  /** Pixel of a value, from the box's top edge. */
  toHeight(value) {
    const { low, high, log } = this.now.y;
    const of = log ? Math.log : (each) => each;
    return this.inner.top + (1 - (of(value) - of(low)) / (of(high) - of(low))) * this.inner.height;
  }

  #point(px, py) {
    if (!this.now) return;
    const { left, width, top, height } = this.inner;
    if (px < left - 4 || px > left + width + 4) { this.#hide(true); return; }
    const { from, to } = this.now.x;
    const x = from + ((px - left) / width) * (to - from);
    this.#cursor(x);
    this.room.bus.dispatchEvent(new CustomEvent("cursor", { detail: { x, source: this } }));
    const told = this.now.tooltip?.(x, 1 - (py - top) / height);
    const events = this.#eventsAt(x);
    if (!told && !events.length) { this.tip.hidden = true; return; }
    this.tip.replaceChildren(h("div", { class: "tip-time" }, stamp(told?.time ?? x), told?.until ? ` to ${clock(told.until)}` : ""), ...(told?.rows ?? []), ...events);
    this.tip.hidden = false;
    const own = this.tip.getBoundingClientRect();
    const box = this.box.getBoundingClientRect();
    const right = px + 14 + own.width < this.size.width || px < own.width;
    this.tip.style.left = `${Math.round(right ? Math.min(px + 14, innerWidth - box.left - own.width - 8) : px - 14 - own.width)}px`;
    this.tip.style.top = `${Math.round(Math.max(Math.min(py - own.height / 2, innerHeight - box.top - own.height - 8), -box.top + 8))}px`;
  }

  #eventsAt(x) {
    const near = (5 / this.inner.width) * (this.now.x.to - this.now.x.from);
    return (this.now.marks ?? []).filter((mark) => x >= mark.time - near && x <= (mark.until ?? mark.end ?? mark.time) + near).slice(0, 6)
      .map((mark) => h("div", { class: "tip-event" }, h("i", { class: "swatch", style: { background: mark.colour } }), markText(mark)));
  }

  #cursor(x) {
    this.cursorX = x;
    const inside = this.now && x !== null && x >= this.now.x.from && x <= this.now.x.to;
    this.line.hidden = !inside;
    if (inside) Object.assign(this.line.style, { left: `${this.toPixel(x)}px`, top: `${this.inner.top}px`, height: `${this.inner.height}px` });
  }

  #hide(tell = false) {
    this.tip.hidden = true;
    this.#cursor(null);
    if (tell) this.room.bus.dispatchEvent(new CustomEvent("cursor", { detail: { x: null, source: this } }));
  }

  /**
   * Draw. `what`: {traces, x: {from, to}, y: {low, high, values, texts, log, title}, y2, shapes, marks, exemplars,
   * tooltip(x, share) -> {time, until, rows} | null, step, label, words, layout}. Marks are events ({time, end, until,
   * colour, name, count}): one alone is a line, several close to each other are a strip along the axis; exemplars are
   * {time, value, href, label, colour, beyond}.
   */
  draw(what) {
    if (this.down) { this.pending = what; return Promise.resolve(); }
    this.pending = null;
    this.now = what;
    const { x, y, y2, shapes = [], marks = [], traces, layout = {} } = what;
    const size = { width: Math.max(80, this.box.clientWidth), height: Math.max(60, this.box.clientHeight) };
    const left = Math.min(size.width * 0.4, 14 + Math.max(18, ...y.texts.map((text) => textWidth(text))) + (y.title ? 16 : 0));
    const right = y2 ? 14 + Math.max(18, ...y2.texts.map((text) => textWidth(text))) : EDGE.right;
    this.size = size;
    this.inner = { left, top: EDGE.top, width: Math.max(20, size.width - left - right), height: Math.max(20, size.height - EDGE.top - EDGE.bottom) };
    const ticks = timeTicks(x.from, x.to, Math.floor(this.inner.width / PIXELS_PER_TICK));
    // A label that would run into those of the other axis is left out; its line says enough.
    ticks.texts = ticks.texts.map((text, index) => (this.toPixel(ticks.values[index]) - textWidth(text) / 2 < left ? "" : text));
    const grid = token("--grid");
    const axis = (each) => ({
      type: each.log ? "log" : "linear",
      range: each.log ? [Math.log10(each.low), Math.log10(each.high)] : [each.low, each.high],
      tickmode: "array", tickvals: each.values, ticktext: each.texts, gridcolor: each.noGrid ? "transparent" : grid, ticks: "",
      zeroline: false, fixedrange: true, showline: false, automargin: false, ticklabelstandoff: 3, title: each.title ? { text: each.title, font: { size: 11 }, standoff: 4 } : undefined,
    });
    const lines = marks.flatMap((mark) => [
      ...(isStrip(mark) ? [] : [{ type: "line", xref: "x", yref: "paper", x0: mark.time, x1: mark.time, y0: 0, y1: 1, line: { color: mark.colour, width: 1, dash: "dot" }, layer: "below" }]),
      ...(mark.end > mark.time ? [{ type: "rect", xref: "x", yref: "paper", x0: mark.time, x1: mark.end, y0: 0, y1: 1, fillcolor: mark.colour, opacity: 0.1, line: { width: 0 }, layer: "below" }] : []),
    ]);
    const full = {
      width: size.width, height: size.height, margin: { l: left, r: right, t: EDGE.top, b: EDGE.bottom, pad: 0 },
      paper_bgcolor: "transparent", plot_bgcolor: "transparent", showlegend: false, hovermode: false, dragmode: "zoom",
      font: { family: token("--font"), size: 11, color: token("--muted") },
      xaxis: { type: "linear", range: [x.from, x.to], tickmode: "array", tickvals: ticks.values, ticktext: ticks.texts, gridcolor: grid, ticks: "", zeroline: false, showline: false, automargin: false },
      yaxis: axis(y), shapes: [...shapes, ...lines], ...layout,
    };
    if (y2) full.yaxis2 = { ...axis(y2), overlaying: "y", side: "right", showgrid: false };
    this.box.setAttribute("aria-label", what.label ?? "chart");
    const drawn = Plotly.react(this.plot, traces, full, { displayModeBar: false, responsive: false, doubleClick: false, showTips: false, scrollZoom: false });
    if (!this.listening) {
      this.listening = true;
      this.plot.on("plotly_relayout", (changed) => {
        const [from, to] = [changed["xaxis.range[0]"], changed["xaxis.range[1]"]];
        if (Number.isFinite(from) && Number.isFinite(to) && to > from) this.room.zoom(Math.round(from), Math.round(to));
      });
    }
    this.#overlay(what);
    this.#cursor(this.cursorX);
    return drawn;
  }

  #overlay({ marks = [], exemplars = [], x, words = "" }) {
    const strips = marks.filter((mark) => isStrip(mark) && mark.until >= x.from && mark.time <= x.to).map((mark) => {
      const [from, to] = [this.toPixel(Math.max(mark.time, x.from)), this.toPixel(Math.min(mark.until, x.to))];
      return h("span", { class: "strip", "aria-hidden": "true", style: { left: `${from - 1}px`, width: `${Math.max(2, to - from + 2)}px`, top: `${this.inner.top + this.inner.height - 4}px`, background: mark.colour } });
    });
    const flags = marks.filter((mark) => !isStrip(mark) && mark.time >= x.from && mark.time <= x.to).map((mark) =>
      h("span", { class: "mark", "aria-hidden": "true", style: { left: `${this.toPixel(mark.time)}px`, top: `${this.inner.top + this.inner.height - 8}px`, color: mark.colour } }, "▲"));
    // A dot that is there stays the same element, so that a redraw takes nothing from under a pointer or a screen reader.
    const known = this.dots;
    this.dots = new Map();
    // Two that say the same of the same trace are one dot.
    const keyOf = (each) => `${each.traceId} ${each.label}`;
    const shown = [...new Map(exemplars.map((each) => [keyOf(each), each])).values()];
    const dots = shown.map((each) => {
      const top = Math.max(this.inner.top, Math.min(this.inner.top + this.inner.height, this.toHeight(each.value)));
      const key = keyOf(each);
      const dot = known.get(key) ?? h("a", { class: "exemplar", data: { traceId: each.traceId } });
      this.dots.set(key, dot);
      dot.href = each.href;
      dot.title = each.label;
      dot.setAttribute("aria-label", each.label);
      dot.style.left = `${this.toPixel(each.time)}px`;
      dot.style.top = `${top}px`;
      dot.style.setProperty("--dot", each.colour);
      return dot;
    });
    const told = words ? h("span", { class: "chart-words", "aria-hidden": "true", style: { left: `${this.inner.left + this.inner.width / 2}px`, top: `${this.inner.top + this.inner.height / 2}px` } }, words) : "";
    this.decor.replaceChildren(...strips, ...flags, told);
    // One that stays is not even moved, since a press that began on an element which goes away, for however short, is none.
    for (const dot of known.values()) if (!dots.includes(dot)) dot.remove();
    let next = this.group.firstElementChild;
    for (const dot of dots) {
      if (dot === next) next = next.nextElementSibling;
      else this.group.insertBefore(dot, next);
    }
    const first = dots.includes(document.activeElement) ? document.activeElement : dots[0];
    for (const dot of dots) dot.tabIndex = dot === first ? 0 : -1;
  }

  /** Take everything away. */
  destroy() {
    this.resize.disconnect();
    removeEventListener("pointerup", this.release);
    this.room.bus.removeEventListener("cursor", this.follow);
    Plotly.purge(this.plot);
    this.box.remove();
  }
}

/** Whether a mark stands for several events that are too close to be told apart, so that a line would be one of them only. */
function isStrip(mark) {
  return mark.count > 1 && !mark.end && mark.until > mark.time;
}

/** What a mark of an event says. */
export function markText(mark) {
  const titles = [...(mark.titles ?? [mark.title])].slice(0, 3).join(", ");
  const until = mark.until ?? mark.end ?? mark.time;
  const when = until > mark.time ? `${clock(mark.time)} to ${clock(until)}` : clock(mark.time);
  return `${titles}${mark.count > 1 ? ` (${mark.count} times)` : ""}${mark.text ? `: ${mark.text}` : ""}, ${when}`;
}
