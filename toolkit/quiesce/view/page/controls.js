/** What stands above a dashboard: time range, refresh, variables, events, links, theme. Rule: it tells, and never asks. */

import { usable } from "./annotations.js";
import { colour } from "./colours.js";
import { h, link } from "./dom.js";
import { interpolateText } from "./interpolate.js";
import { fillAddress } from "./links.js";
import { write } from "./state.js";
import { theme } from "./theme.js";
import { moment, QUICK, rangeText, resolve, stamp } from "./timerange.js";
import { ALL } from "./variables.js";

/** What the list of refresh intervals offers. */
export const REFRESH = ["", "1s", "2s", "5s", "10s", "30s", "1m", "5m"];

/** The time picker. `told`: {onRange(from, to), onShift(direction), onZoomOut(), now()}. Returns {element, show(range)}. */
export function timePicker(told) {
  const button = h("button", { type: "button", class: "control range", popovertarget: "time-panel", "aria-label": "Time range" }, "…");
  const from = h("input", { type: "text", name: "from", size: "20", spellcheck: "false", autocomplete: "off" });
  const to = h("input", { type: "text", name: "to", size: "20", spellcheck: "false", autocomplete: "off" });
  const wrong = h("p", { class: "trouble", role: "alert", hidden: true }, "");
  const panel = h("div", { class: "time-panel", id: "time-panel", popover: "auto" });
  const submit = (event) => {
    event.preventDefault();
    const ends = resolve({ from: from.value, to: to.value }, told.now());
    wrong.hidden = Boolean(ends);
    if (!ends) { wrong.textContent = "Write two moments, the earlier one first: now-15m, 2026-05-01 13:00, or Unix milliseconds."; return; }
    const absolute = (text) => (/^now/.test(text.trim()) ? text.trim() : String(Math.round(moment(text, told.now()))));
    panel.hidePopover();
    told.onRange(absolute(from.value), absolute(to.value));
  };
  panel.append(
    h("form", { onsubmit: submit }, h("label", {}, "From", from), h("label", {}, "To", to), wrong, h("button", { type: "submit", class: "control" }, "Apply"), h("p", { class: "quiet" }, "Drag across a chart to zoom in, double-click to zoom out.")),
    h("div", { class: "quick", role: "group", "aria-label": "Quick ranges" }, ...QUICK.map(([start, text]) => h("button", { type: "button", data: { from: start }, onclick: () => { panel.hidePopover(); told.onRange(start, "now"); } }, text))));
  panel.addEventListener("beforetoggle", () => {
    const at = button.getBoundingClientRect();
    panel.style.top = `${at.bottom + 8}px`;
    panel.style.right = `${Math.max(8, innerWidth - at.right)}px`;
  });
  const step = (text, label, act) => h("button", { type: "button", class: "control step", "aria-label": label, title: label, onclick: act }, text);
  const element = h("div", { class: "time" }, step("‹", "Earlier by half the range", () => told.onShift(-1)), button, step("›", "Later by half the range", () => told.onShift(1)), step("−", "Zoom out", () => told.onZoomOut()), panel);
  const show = (range) => {
    button.textContent = rangeText(range, told.now());
    const typed = (text) => (/^now/.test(text) ? text : stamp(moment(text, told.now())));
    if (!panel.matches(":popover-open")) { from.value = typed(String(range.from)); to.value = typed(String(range.to)); }
    for (const each of panel.querySelectorAll("[data-from]")) each.setAttribute("aria-pressed", String(range.to === "now" && each.dataset.from === range.from));
  };
  return { element, show };
}

/** Choice of how often to ask anew, and a button to do so now. */
export function refreshPicker({ onRefresh, onInterval }) {
  const select = h("select", { class: "control", "aria-label": "Refresh interval", title: "Refresh interval", onchange: () => onInterval(select.value) });
  const button = h("button", { type: "button", class: "control", "aria-label": "Refresh now", title: "Refresh now", onclick: onRefresh }, "⟳");
  const show = (interval) => {
    const offered = [...new Set([...REFRESH, interval])];
    select.replaceChildren(...offered.map((each) => h("option", { value: each, selected: each === interval }, each ? `every ${each}` : "no refresh")));
    select.value = interval;
  };
  return { element: h("div", { class: "refresh" }, button, select), show };
}

/** The button that goes from dark to light and back. */
export function themeSwitch(onTheme) {
  const button = h("button", { type: "button", class: "control", onclick: () => onTheme(theme() === "dark" ? "light" : "dark") });
  const show = () => {
    const other = theme() === "dark" ? "light" : "dark";
    button.textContent = theme() === "dark" ? "☾" : "☀";
    button.setAttribute("aria-label", `Switch to the ${other} theme`);
    button.title = `Switch to the ${other} theme`;
  };
  return { element: button, show };
}

/** A select for each variable that is shown. `onChoice(name, values)`. */
export function variableBar(list, onChoice) {
  return list.filter(({ definition }) => definition.hide !== 2 && definition.type !== "constant").map(({ definition, options, chosen }) => {
    const label = definition.label || definition.name;
    if (definition.type === "textbox") return h("label", { class: "variable" }, label, h("input", { class: "control", value: chosen.value, onchange: (event) => onChoice(definition.name, [event.target.value]) }));
    return definition.multi ? several(definition, label, options, chosen, onChoice) : single(definition, label, options, chosen, onChoice);
  });
}

function single(definition, label, options, chosen, onChoice) {
  const all = definition.includeAll ? [h("option", { value: ALL, selected: chosen.all }, "All")] : [];
  const none = !options.length && !all.length ? [h("option", { value: "" }, "none yet")] : [];
  const value = [chosen.value].flat()[0] ?? "";
  const select = h("select", { class: "control", data: { variable: definition.name }, onchange: () => onChoice(definition.name, [select.value]) }, ...none, ...all, ...options.map((each) => h("option", { value: each, selected: !chosen.all && each === value }, each)));
  return h("label", { class: "variable" }, label, select);
}

function several(definition, label, options, chosen, onChoice) {
  const id = `variable-${definition.name}`;
  const text = chosen.all ? "All" : [chosen.value].flat().join(", ") || "none yet";
  const boxes = options.map((each) => h("input", { type: "checkbox", value: each, checked: !chosen.all && [chosen.value].flat().includes(each) }));
  const all = h("input", { type: "checkbox", checked: chosen.all });
  const tell = () => {
    const values = boxes.filter((box) => box.checked).map((box) => box.value);
    onChoice(definition.name, all.checked || !values.length ? [ALL] : values);
  };
  all.addEventListener("change", () => { if (all.checked) for (const box of boxes) box.checked = false; else all.checked = !boxes.some((box) => box.checked); tell(); });
  for (const box of boxes) box.addEventListener("change", () => { all.checked = false; tell(); });
  const button = h("button", { type: "button", class: "control multi", id: `${id}-button`, popovertarget: id, "aria-label": `${label}: ${text}`, data: { variable: definition.name } }, text);
  const panel = h("div", { class: "choices", id, popover: "auto", role: "group", "aria-label": label }, definition.includeAll ? h("label", {}, all, "All") : null, ...options.map((each, index) => h("label", {}, boxes[index], each)));
  panel.addEventListener("beforetoggle", () => {
    const at = button.getBoundingClientRect();
    panel.style.left = `${Math.min(at.left, innerWidth - 260)}px`;
    panel.style.top = `${at.bottom + 6}px`;
  });
  return h("span", { class: "variable" }, h("span", { "aria-hidden": "true" }, label), button, panel);
}

/** A switch for each kind of event. */
export function eventBar(dashboard, off, onSwitch) {
  return usable(dashboard).filter(({ hide }) => !hide).map((definition) => h("label", { class: "variable event" }, h("input", { type: "checkbox", checked: !off.has(definition.name), onchange: (event) => onSwitch(definition.name, event.target.checked) }), h("i", { class: "swatch", style: { background: colour(definition.iconColor ?? "blue", theme()) } }), definition.name));
}

/** Links of the dashboard beside those to the others, which are always there. */
export function linkBar(dashboard, all, context) {
  const inside = new Set(all.map(({ uid }) => uid));
  return (dashboard.links ?? []).filter(({ type }) => type === "link").flatMap((each) => {
    const time = each.keepTime ? "${__url_time_range}" : "";
    const variables = each.includeVars ? "${__all_variables}" : "";
    const query = [time, variables].filter(Boolean).join("&");
    const url = query ? `${each.url}${each.url.includes("?") ? "&" : "?"}${query}` : each.url;
    const href = fillAddress(url, context);
    const uid = /^#\/d\/([\w-]+)/.exec(href)?.[1];
    return uid && inside.has(uid) ? [] : [link(href, { class: "dash-link", title: each.tooltip ?? "" }, interpolateText(each.title, context.variables))];
  });
}

const FIRST = ["windows", "slots", "ownership", "gate", "training"];

/** The dashboards in the order in which an operator asks: the five of the project first. */
export function inOrder(all) {
  const place = ({ uid }) => { const at = FIRST.findIndex((name) => uid === `quiesce-${name}`); return at < 0 ? FIRST.length : at; };
  return [...all].sort((one, two) => place(one) - place(two));
}

function tabTitle(title) {
  const text = title.replace(/^quiesce\s*[:/–-]\s*/i, "");
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** Tabs of all dashboards; time, variables, refresh and theme go along. */
export function tabs(all, current, state) {
  return all.map(({ uid, title }) => h("a", { class: "tab", href: write({ ...state, page: "d", id: uid }), "aria-current": uid === current ? "page" : null }, tabTitle(title)));
}
