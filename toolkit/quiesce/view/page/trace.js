/**
 * A trace as a waterfall: a bar for each span under its parent, its attributes on a press, links to other traces.
 * Rule: a tree by keyboard as trees are: up and down move, right and left open and close, Enter shows the attributes.
 */

import { paletteColour, colour } from "./colours.js";
import { h } from "./dom.js";
import { theme } from "./theme.js";
import { seconds } from "./units.js";
import { stamp } from "./timerange.js";

const MOST = 2000;

/** Spans as rows, parents before children, each with its depth and number of children; a span whose parent is not there is a root. */
export function rows(spans) {
  const known = new Set(spans.map((span) => span.span_id));
  const children = new Map();
  for (const span of [...spans].sort((one, two) => one.start - two.start || two.end - one.end)) {
    const parent = known.has(span.parent_id) && span.parent_id !== span.span_id ? span.parent_id : "";
    children.set(parent, [...(children.get(parent) ?? []), span]);
  }
  const found = [];
  const visit = (id, depth) => {
    for (const span of children.get(id) ?? []) {
      const inside = children.get(span.span_id)?.length ?? 0;
      found.push({ span, depth, children: inside });
      if (inside) visit(span.span_id, depth + 1);
    }
  };
  visit("", 0);
  return found;
}

const short = (name) => name.replace(/^quiesce\./, "");

// The part of a name that its neighbours share stands for itself, so that it can go where there is no room.
function label(name) {
  const [, prefix, rest] = /^(checkpoint\.)(.+)$/.exec(short(name)) ?? [];
  return prefix ? [h("span", { class: "span-prefix" }, prefix), rest] : [short(name)];
}

/** How a span ended, as it is drawn and told: failed, refused, cancelled, skipped, cut-off or completed; "" if it does not say. */
export function ending(span) {
  if (span.cut_off || span.attributes?.["quiesce.cut_off"]) return "cut-off";
  const outcome = span.attributes?.["quiesce.outcome"];
  if (span.status === "error") return outcome === "refused" ? "refused" : "failed";
  return outcome === "failed" ? "" : outcome ?? "";
}

const WORDS = { failed: "failed", refused: "refused", cancelled: "cancelled", skipped: "skipped", "cut-off": "cut off" };
const MARKS = { failed: "✕", refused: "✕", cancelled: "⊘", skipped: "⊘", "cut-off": "✂" };
const MEANINGS = {
  failed: "failed: an error",
  refused: "refused: an error",
  cancelled: "cancelled: somebody gave it up; no error",
  skipped: "skipped: there was nothing to do; no error",
  "cut-off": "cut off: open when the process ended, so its end and its duration say nothing",
};

const errorOf = (span) => (span.status === "error" ? span.attributes?.["quiesce.error"] ?? "" : "");

function detail(span, start) {
  const attributes = Object.entries(span.attributes ?? {}).sort(([one], [two]) => one.localeCompare(two));
  const table = (pairs) => h("table", { class: "grid-table" }, h("tbody", {}, ...pairs.map(([key, value]) => h("tr", {}, h("th", { scope: "row" }, key), h("td", {}, typeof value === "object" ? JSON.stringify(value) : String(value))))));
  return h("div", { class: "span-detail" },
    MEANINGS[ending(span)] ? h("p", { class: `ended ${ending(span)}` }, `${MARKS[ending(span)]} ${MEANINGS[ending(span)]}${errorOf(span) ? ` (quiesce.error: ${errorOf(span)})` : ""}`) : null,
    table([["span", span.name], ["starts", `${stamp(span.start * 1000)}, ${seconds(span.start - start)} into the trace`], ["takes", ending(span) === "cut-off" ? `at least ${seconds(span.end - span.start)}` : seconds(span.end - span.start)], ["status", span.status || "unset"], ["span id", span.span_id], ...attributes]),
    span.events?.length ? h("div", {}, h("h4", {}, "Events"), table(span.events.map((event) => [`${seconds(event.time - start)}: ${event.name}`, Object.entries(event.attributes ?? {}).map(([key, value]) => `${key}=${value}`).join(" ")]))) : null,
    span.links?.length ? h("div", {}, h("h4", {}, `Links to ${span.links.length} other traces`), h("ul", { class: "span-links" }, ...span.links.slice(0, 200).map((each) => h("li", {}, h("a", { href: `#/trace/${each.trace_id}?span=${each.span_id}` }, `${each.trace_id.slice(0, 8)}… span ${each.span_id}`))))) : null);
}

/** Show a trace in `root`. `back` is the address of the dashboard. Returns when it is drawn. */
export async function showTrace(root, id, { server, back, signal, wanted }) {
  const frame = (...content) => root.replaceChildren(h("div", { class: "trace", data: { traceId: id } }, h("a", { class: "back", href: back }, "‹ Back to the dashboard"), ...content));
  frame(h("p", { class: "quiet", role: "status" }, `Looking for trace ${id} …`));
  let trace;
  try {
    trace = await server.json(`/api/trace/${encodeURIComponent(id)}`, { signal });
  } catch (error) {
    if (error.name === "AbortError") return;
    frame(h("h2", { tabindex: "-1" }, `Trace ${id.slice(0, 8)}…`), h("p", { class: "trouble", role: "alert" }, error.message), h("p", { class: "quiet" }, "A trace can be shown while its run folder records spans (the recorder keeps a bounded number of them) and a second or two after its end."));
    return;
  }
  const all = rows(trace.spans);
  const start = Math.min(...trace.spans.map((span) => span.start));
  const end = Math.max(...trace.spans.map((span) => span.end), start + 1e-6);
  const names = [...new Set(all.map(({ span }) => span.name))];
  const tint = (span) => paletteColour(names.indexOf(span.name) % 5, theme());
  const tinted = (span) => ({ failed: colour("red", theme()), refused: colour("red", theme()), cancelled: colour("gray", theme()), skipped: colour("gray", theme()) })[ending(span)] ?? tint(span);
  const long = (span) => `${ending(span) === "cut-off" ? "≥ " : ""}${seconds(span.end - span.start)}`;
  const endings = [...new Set(all.map(({ span }) => ending(span)))].filter((each) => WORDS[each]);
  const closed = new Set();
  const opened = new Set();
  const list = h("ul", { class: "spans", role: "tree", "aria-label": "Spans" });
  const ticks = [0, 0.25, 0.5, 0.75, 1];
  const item = ({ span, depth, children }) => {
    const left = ((span.start - start) / (end - start)) * 100;
    const width = Math.max(0.15, ((span.end - span.start) / (end - start)) * 100);
    const links = span.links?.length ?? 0;
    const row = h("div", { class: "span-row" },
      h("div", { class: "span-name", style: { paddingLeft: `calc(${depth} * var(--indent) + 4px)` } },
        h("span", { class: `chevron${children ? "" : " none"}`, "aria-hidden": "true" }, children ? "›" : ""), h("span", { class: "span-label" }, ...label(span.name)), span.attributes?.["quiesce.kind"] ?? span.attributes?.["quiesce.part"] ?? "", WORDS[ending(span)] ? h("strong", { class: `ended ${ending(span)}` }, ` ${MARKS[ending(span)]} ${WORDS[ending(span)]}`) : null, links ? h("span", { class: "quiet" }, ` ${links} links`) : null),
      h("div", { class: "span-track" },
        h("span", { class: "span-bar", data: { ending: ending(span) }, style: { left: `${left}%`, width: `${Math.min(width, 100 - left)}%`, "--tint": tinted(span) } }),
        ...(span.events ?? []).map((event) => h("span", { class: "span-event", title: event.name, style: { left: `${((event.time - start) / (end - start)) * 100}%` } })),
        h("span", { class: `span-time${left + width > 70 && left < 30 ? " inside" : ""}`, style: left + width <= 70 ? { left: `${left + width}%` } : left < 30 ? { left: `${left}%` } : { right: `${100 - left}%` } }, long(span))));
    return h("li", { role: "treeitem", tabindex: "-1", "aria-level": depth + 1, "aria-expanded": children ? String(!closed.has(span.span_id)) : null, "aria-selected": String(opened.has(span.span_id)), "aria-label": `${short(span.name)}, ${ending(span) === "cut-off" ? "at least " : ""}${seconds(span.end - span.start)}${WORDS[ending(span)] ? `, ${WORDS[ending(span)]}` : ""}`, data: { spanId: span.span_id, name: span.name } },
      row, opened.has(span.span_id) ? detail(span, start) : null);
  };
  const draw = (focus) => {
    const visible = [];
    let below = Infinity;
    for (const row of all) {
      if (row.depth > below) continue;
      below = closed.has(row.span.span_id) ? row.depth : Infinity;
      visible.push(row);
    }
    list.replaceChildren(...visible.slice(0, MOST).map(item));
    const target = [...list.children].find((each) => each.dataset.spanId === focus) ?? list.firstElementChild;
    if (target) target.tabIndex = 0;
    if (focus && target) { target.focus({ preventScroll: false }); }
  };
  const toggle = (set, span) => { if (!set.delete(span)) set.add(span); draw(span); };
  list.addEventListener("click", (event) => {
    const li = event.target.closest("li[role=treeitem]");
    if (!li || event.target.closest("a, .span-detail")) return;
    toggle(event.target.closest(".chevron:not(.none)") ? closed : opened, li.dataset.spanId);
  });
  list.addEventListener("keydown", (event) => {
    const li = event.target.closest("li[role=treeitem]");
    if (!li || event.target !== li) return;
    const go = (to) => { if (to) { li.tabIndex = -1; to.tabIndex = 0; to.focus(); } };
    const id = li.dataset.spanId;
    const act = {
      ArrowDown: () => go(li.nextElementSibling), ArrowUp: () => go(li.previousElementSibling), Home: () => go(list.firstElementChild), End: () => go(list.lastElementChild),
      ArrowRight: () => (li.getAttribute("aria-expanded") === "false" ? toggle(closed, id) : go(li.nextElementSibling)),
      ArrowLeft: () => (li.getAttribute("aria-expanded") === "true" ? toggle(closed, id) : go(list.querySelector(`[data-span-id="${all.find(({ span }) => span.span_id === id)?.span.parent_id}"]`))),
      Enter: () => toggle(opened, id), " ": () => toggle(opened, id), Escape: () => (opened.delete(id) ? draw(id) : (location.hash = back.replace(/^#/, ""))),
    }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  const root0 = all[0]?.span;
  opened.add(wanted ?? root0?.span_id);
  const heading = h("h2", { tabindex: "-1" }, `${short(root0?.name ?? "trace")} `, h("span", { class: "quiet" }, `trace ${id.slice(0, 8)}…`));
  frame(heading, h("p", { class: "quiet" }, `${all.length} span${all.length === 1 ? "" : "s"}, ${seconds(end - start)}, began ${stamp(start * 1000)}${all.length > MOST ? `; the first ${MOST} are shown` : ""}`),
    endings.length ? h("ul", { class: "span-key", "aria-label": "How spans ended" }, ...endings.map((each) => h("li", { class: `ended ${each}` }, h("i", { class: "span-bar", data: { ending: each }, style: { "--tint": ["failed", "refused"].includes(each) ? colour("red", theme()) : each === "cut-off" ? paletteColour(0, theme()) : colour("gray", theme()) } }), `${MARKS[each]} ${MEANINGS[each]}`))) : null,
    h("div", { class: "span-ruler", "aria-hidden": "true" }, h("div", {}, ""), h("div", { class: "span-track" }, ...ticks.map((share) => h("span", { style: share === 1 ? { right: 0 } : { left: `${share * 100}%` } }, seconds((end - start) * share))))), list);
  draw(null);
  heading.focus();
  if (wanted) draw(wanted);
}
