/** A dialog with what is behind a panel: its queries, its numbers, its exemplars. */

import { h, link } from "./dom.js";
import { clock } from "./timerange.js";
import { durationText } from "./timerange.js";

/** Open it for a panel. Escape closes; the focus goes back. */
export function inspect(panel) {
  const { json, queries, last } = panel;
  const close = () => dialog.close();
  const tables = panel.table().slice(0, 20);
  const dialog = h("dialog", { class: "inspect", "aria-label": `Data and queries of ${json.title}`, onclose: () => dialog.remove(), onclick: (event) => { if (event.target === dialog) close(); } },
    h("header", {}, h("h2", {}, json.title), h("button", { type: "button", class: "icon", "aria-label": "Close", onclick: close }, "×")),
    json.description ? h("p", {}, json.description) : null,
    h("h3", {}, "Queries"),
    ...queries.map(({ target, expr, at }) => h("div", { class: "query" }, h("div", { class: "quiet" }, `${target.refId ?? ""} ${target.instant ? "instant" : `step ${durationText(at.step)}`}`), h("pre", {}, expr))),
    queries.length ? null : h("p", { class: "quiet" }, json.targets?.length ? "Nothing was asked yet." : "This panel asks nothing."),
    last?.exemplars.length ? h("h3", {}, "Exemplars") : null,
    last?.exemplars.length ? h("ul", {}, ...last.exemplars.map((each) => h("li", {}, h("a", { href: each.href, onclick: close }, `${clock(each.time)}: ${each.value.toPrecision(3)} ${Object.entries(each.labels).filter(([key]) => !key.endsWith("_id") && key !== "__name__").map(([key, value]) => `${key}=${value}`).join(" ")}`)))) : null,
    panel.board.events.length ? h("h3", {}, "Events") : null,
    panel.board.events.length ? h("ul", {}, ...panel.board.events.slice(-50).reverse().map((event) => h("li", {}, `${clock(event.time)}: ${event.title} ${event.text}`))) : null,
    h("h3", {}, "Data"),
    ...tables.map(({ head, rows }) => h("div", { class: "table-holder" }, h("table", { class: "grid-table" }, h("thead", {}, h("tr", {}, ...head.map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, ...rows.map((row) => h("tr", {}, ...row.map((text) => h("td", {}, text)))))))),
    tables.length ? null : h("p", { class: "quiet" }, "Nothing yet."),
    panel.element.dataset.state === "error" ? link("/api/info", { class: "quiet" }, "state of the server") : null);
  document.body.append(dialog);
  dialog.showModal();
}
