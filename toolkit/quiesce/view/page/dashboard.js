/**
 * A dashboard: its rows and panels in Grafana's grid of 24 columns, its variables, its events. Rule: a collapsed row's
 * panels do not exist, and a panel out of view asks nothing.
 */

import { fetchEvents, usable } from "./annotations.js";
import { h } from "./dom.js";
import { Panel } from "./panel.js";
import { isOutdated } from "./requests.js";

/** Panels of a dashboard by row: [{row | null, panels}]. */
export function sections(panels) {
  const sorted = [...panels].sort((one, two) => one.gridPos.y - two.gridPos.y || one.gridPos.x - two.gridPos.x);
  const found = [{ row: null, panels: [] }];
  for (const panel of sorted) {
    if (panel.type === "row") found.push({ row: panel, panels: [...(panel.panels ?? [])] });
    else found.at(-1).panels.push(panel);
  }
  return found.filter(({ row, panels: inside }) => row || inside.length);
}

/** A dashboard that is shown in `root`. `shared`: {server, room, scrapeMs(), range(), rawRange(), now(), onProblem}. */
export class Dashboard {
  constructor(json, root, shared) {
    Object.assign(this, { json, root, ready: false, variables: {}, events: [], panels: [], server: shared.server, room: shared.room, shared });
    this.off = new Set(usable(json).filter(({ enable }) => enable === false).map(({ name }) => name));
    this.watch = new IntersectionObserver((entries) => {
      for (const entry of entries) this.panels.find(({ element }) => element === entry.target)?.see(entry.isIntersecting);
    }, { rootMargin: "120px" });
    const groups = sections(json.panels ?? []);
    this.root.replaceChildren(...groups.map((group) => this.#section(group)));
  }

  range() { return this.shared.range(); }

  now() { return this.shared.now(); }

  get scrapeMs() { return this.shared.scrapeMs(); }

  /** What links are filled from. */
  context() { return { variables: this.variables, range: this.range(), raw: this.shared.rawRange() }; }

  #section({ row, panels }) {
    const top = Math.min(...panels.map(({ gridPos }) => gridPos.y));
    const grid = h("div", { class: "grid", id: `row-${row?.id ?? "top"}` });
    let made = [];
    const open = () => {
      made = panels.map((json) => {
        const panel = new Panel(row?.repeat ? { ...json, repeat: row.repeat } : json, this);
        const { x, y, w, h: rows } = json.gridPos;
        Object.assign(panel.element.style, { gridColumn: `${x + 1} / span ${w}`, gridRow: `${y - top + 1} / span ${rows}` });
        panel.element.style.setProperty("--rows", rows);
        panel.element.style.setProperty("--order", y * 24 + x);
        grid.append(panel.element);
        this.watch.observe(panel.element);
        return panel;
      });
      this.panels.push(...made);
    };
    const close = () => {
      for (const panel of made) { this.watch.unobserve(panel.element); panel.destroy(); }
      this.panels = this.panels.filter((panel) => !made.includes(panel));
      made = [];
    };
    if (!row) { open(); return h("section", { class: "row" }, grid); }
    const key = `quiesce-view-row-${this.json.uid}-${row.id}`;
    let collapsed = Boolean(row.collapsed);
    try { const kept = sessionStorage.getItem(key); if (kept !== null) collapsed = kept === "closed"; } catch { /* nothing is kept then */ }
    const button = h("button", { type: "button", class: "row-title", "aria-controls": grid.id, onclick: () => set(!collapsed) }, h("span", { class: "chevron", "aria-hidden": "true" }, "›"), h("span", {}, row.title), h("span", { class: "quiet" }, ""));
    const set = (next) => {
      collapsed = next;
      grid.hidden = next;
      button.setAttribute("aria-expanded", String(!next));
      button.lastChild.textContent = next ? `${panels.length} panels` : "";
      try { sessionStorage.setItem(key, next ? "closed" : "open"); } catch { /* as above */ }
      if (next) close(); else if (!made.length) open();
    };
    const section = h("section", { class: "row", data: { row: row.title } }, h("h2", {}, button), grid);
    set(collapsed);
    return section;
  }

  /** Set the variables, and ask everything anew. */
  start(variables) {
    this.variables = variables;
    this.ready = true;
    return this.refresh();
  }

  /** Ask for events, and have every panel ask for its data. */
  refresh() {
    this.eventsStopper?.abort();
    const stopper = new AbortController();
    this.eventsStopper = stopper;
    const asked = this.panels.map((panel) => panel.refresh());
    const wanted = usable(this.json).filter(({ name }) => !this.off.has(name));
    const events = fetchEvents(wanted, { server: this.server, range: this.range(), variables: this.variables, scrapeMs: this.scrapeMs, signal: stopper.signal, onError: (definition, error) => this.shared.onProblem(`events "${definition.name}": ${error.message}`) })
      .then((found) => { this.events = found; for (const panel of this.panels) if (panel.visible && !panel.stopper) panel.draw(); })
      .catch((error) => { if (!isOutdated(error)) throw error; });
    return Promise.allSettled([...asked, events]);
  }

  /** Draw again without asking. */
  redraw() { for (const panel of this.panels) panel.draw(); }

  /** Whether questions are under way. */
  get busy() { return this.panels.some(({ stopper }) => stopper); }

  /** Take everything away. */
  destroy() {
    this.eventsStopper?.abort();
    this.watch.disconnect();
    for (const panel of this.panels) panel.destroy();
    this.panels = [];
    this.root.replaceChildren();
  }
}
