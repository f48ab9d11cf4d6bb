/** A legend that is a list or a table of buttons: one press shows a series alone, with Ctrl or Shift it goes or comes. */

import { h } from "./dom.js";
import { display } from "./fields.js";
import { calcTitle, reduce } from "./reduce.js";
import { theme } from "./theme.js";

function pressed(series, hidden, id, event) {
  const others = series.filter((each) => each.id !== id);
  if (event.ctrlKey || event.metaKey || event.shiftKey) {
    if (!hidden.delete(id)) hidden.add(id);
    if (series.every((each) => hidden.has(each.id))) hidden.clear();
    return;
  }
  const alone = !hidden.has(id) && others.length > 0 && others.every((each) => hidden.has(each.id));
  hidden.clear();
  if (!alone) for (const each of others) hidden.add(each.id);
}

const MANY = 6;
const quiet = ({ values }) => values.every((value) => value === null || value === 0);

/** Fill the legend's element. `hidden` is a set of ids that `changed()` is told of after a press. */
export function drawLegend(element, options = {}, series, hidden, changed) {
  const { showLegend = true, displayMode = "list", placement = "bottom", calcs = [] } = options ?? {};
  const visible = showLegend && displayMode !== "hidden" && series.length > 0;
  element.hidden = !visible;
  element.dataset.placement = placement;
  element.parentElement.dataset.legend = visible ? placement : "none";
  if (!visible) { element.replaceChildren(); return; }
  const value = (each, calc) => display(reduce(each.values, calc), each.field.config, theme()).text;
  const focused = document.activeElement?.closest?.(".legend") === element ? document.activeElement.dataset.id : null;
  const button = (each) => h("button", {
    type: "button", class: "legend-item", data: { id: each.id }, "aria-pressed": String(!hidden.has(each.id)), title: `${each.name} (click: alone; Ctrl-click: on or off)`,
    onclick: (event) => { pressed(series, hidden, each.id, event); changed(); },
  }, h("i", { class: "swatch", style: { background: each.colour } }), h("span", {}, each.name));
  if (displayMode === "table") {
    element.replaceChildren(h("table", {},
      calcs.length ? h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Name"), ...calcs.map((calc) => h("th", { scope: "col" }, calcTitle(calc))))) : null,
      h("tbody", {}, ...series.map((each) => h("tr", {}, h("td", {}, button(each)), ...calcs.map((calc) => h("td", {}, value(each, calc))))))));
  } else {
    // Of many series, those that are 0 all along share one button, so that what has happened is seen, and the chart has room.
    const folded = series.length > MANY && element.dataset.unfolded !== "yes" ? series.filter((each) => quiet(each) && !hidden.size) : [];
    const shown = folded.length > 2 ? series.filter((each) => !folded.includes(each)) : series;
    const names = folded.map(({ name }) => name).join(", ");
    element.replaceChildren(...shown.map((each) => h("span", { class: "legend-entry" }, button(each), ...calcs.map((calc) => h("span", { class: "legend-calc" }, `${calcTitle(calc)}: ${value(each, calc)}`)))),
      shown.length < series.length ? h("button", { type: "button", class: "legend-item legend-more", data: { id: "" }, title: names, "aria-label": `${folded.length} series are 0 all along: ${names}`, onclick: () => { element.dataset.unfolded = "yes"; changed(); [...element.querySelectorAll("button")].find((each) => each.dataset.id === folded[0].id)?.focus(); } }, `${folded.length} at 0 …`) : "");
  }
  if (focused !== null) [...element.querySelectorAll("button")].find((each) => each.dataset.id === focused)?.focus();
}
