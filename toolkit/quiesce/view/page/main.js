/**
 * The page: reads its address, shows what it says, and keeps it fresh.
 *
 * Rules: the address is the only state; one refresh at a time; nothing is asked while the page is hidden; when Prometheus
 * or the server is away a banner says so, and the page tries on by itself.
 */

import { alertBadge, readAlerts, readAlertSeries } from "./alerts.js";
import { eventBar, inOrder, linkBar, refreshPicker, tabs, themeSwitch, timePicker, variableBar } from "./controls.js";
import { Dashboard } from "./dashboard.js";
import { h } from "./dom.js";
import { isOutdated, Server } from "./requests.js";
import { parse, refreshMs, write } from "./state.js";
import { applyTheme, onSystemTheme, rememberTheme } from "./theme.js";
import { clock, covering, resolve as resolveRange, shifted, zoomedOut } from "./timerange.js";
import { showTrace } from "./trace.js";
import { inAddress, resolve as resolveVariables } from "./variables.js";
import { showViolations, violationLink } from "./violations.js";

const VARIABLES_EVERY = 10e3; // a run that starts, or restarts elsewhere, is in the choices after so many ms
const RETRY_MS = 2000;

const root = document.querySelector("#content");
const banner = document.querySelector("#banner");

let info = { scrape_interval: 15 };
let all = [];
let state = parse(location.hash);
let shown = null; // {uid, dashboard, json}
let timer = null;
let retry = null;
let stopper = new AbortController();
let variablesAt = 0;
let lastVariables = "";
let freshAt = 0;
let pinned = null; // both ends of the time range, for as long as one refresh takes
let clockShift = 0;
let problem = { kind: "ok", message: "" };

const now = () => Date.now() + clockShift;
const server = new Server({ onHealth: health });
const room = {
  bus: new EventTarget(),
  zoom: (from, to) => go({ from: String(from), to: String(to) }),
  zoomOut: () => { const ends = zoomedOut(range(), now()); go({ from: String(ends.from), to: String(ends.to) }); },
};
const badge = alertBadge();
const violations = violationLink();
let records = [];
const picker = timePicker({ now, onRange: (from, to) => go({ from, to }), onShift: (direction) => { const ends = shifted(range(), direction); go({ from: String(ends.from), to: String(ends.to) }); }, onZoomOut: room.zoomOut });
const refresher = refreshPicker({ onRefresh: () => refresh({ variables: true }), onInterval: (interval) => go({ refresh: interval }, { replace: true }) });
const themes = themeSwitch((choice) => { rememberTheme(choice); go({ theme: choice }, { replace: true }); });

/** What the address leaves open. */
function effective() {
  const json = shown?.json ?? {};
  const recorded = isRecorded();
  const widest = json.time?.from ?? "now-1h";
  const ends = state.from !== undefined ? { from: state.from, to: state.to }
    : recorded ? { from: String(Math.floor(info.from * 1000)), to: String(Math.ceil(info.to * 1000)) }
    : { from: info.from ? covering(info.from * 1000, now(), widest) : widest, to: json.time?.to ?? "now" };
  const interval = state.refresh ?? (recorded ? "" : json.refresh || "5s");
  return { ...ends, refresh: interval };
}

function range() {
  return pinned ?? resolveRange(effective(), now()) ?? { from: now() - 3600e3, to: now() };
}

/** How far samples are apart: further where the range reaches back into what was only recorded. */
function scrapeMs() {
  const { scrape_interval: live, past } = info;
  const reachesBack = past?.until && past.spacing && range().from < past.until * 1000;
  return (reachesBack ? Math.max(live || 0, past.spacing) : live || 15) * 1000;
}

function go(changes, { replace = false } = {}) {
  const next = write({ ...state, ...changes });
  if (next === location.hash) return;
  if (replace) { history.replaceState(null, "", next); route(); } else location.hash = next;
}

function health(kind, message) {
  const was = problem.kind;
  problem = { kind, message };
  if (kind === "ok") {
    banner.hidden = true;
    if (was !== "ok") document.documentElement.dataset.away = "no";
    return;
  }
  document.documentElement.dataset.away = "yes";
  const old = freshAt ? ` What is drawn is from ${clock(freshAt)}.` : "";
  banner.replaceChildren(h("strong", {}, kind === "server" ? "No answer from this page's server." : "Prometheus does not answer."), ` ${message} ${old} Trying again every ${RETRY_MS / 1000} s.`);
  banner.hidden = false;
  badge.show(null, now());
  if (!retry) retry = setTimeout(knock, RETRY_MS);
}

async function knock() {
  retry = null;
  try {
    const fresh = await server.json("/api/info");
    info = fresh;
    if (fresh.prometheus?.ok) {
      await server.prometheus("query", { query: "vector(1)" });
      await route({ force: true });
      return;
    }
    health("prometheus", fresh.prometheus?.error || "");
  } catch {
    retry ??= setTimeout(knock, RETRY_MS);
  }
}

function say(message, tone = "quiet") {
  root.replaceChildren(h("p", { class: `notice ${tone}`, role: tone === "trouble" ? "alert" : "status" }, message));
}

/** Show what the address says. */
async function route({ force = false } = {}) {
  const before = state;
  state = parse(location.hash);
  if (applyTheme(state.theme)) { themes.show(); shown?.dashboard.redraw(); drawBars(); }
  if (state.page !== before.page) for (const each of document.querySelectorAll(":popover-open")) each.hidePopover();
  if (state.page === "trace" && state.id) {
    if (!force && before.page === "trace" && before.id === state.id && root.querySelector(".trace")) return;
    const back = before.page === "d" && before.id ? write(before) : lastDashboard;
    lastDashboard = back;
    leave();
    document.body.dataset.page = "trace";
    document.title = `Trace ${state.id.slice(0, 8)} – Quiesce`;
    const wanted = new URLSearchParams(location.hash.split("?")[1] ?? "").get("span") ?? undefined;
    around();
    await showTrace(root, state.id, { server, back, signal: stopper.signal, wanted });
    return;
  }
  if (state.page === "violations") {
    if (before.page === "d") lastDashboard = before.id ? write(before) : "#/";
    leave();
    document.body.dataset.page = "violations";
    document.title = "Violations – Quiesce";
    around();
    await showViolations(root, { server, back: lastDashboard, signal: stopper.signal, wanted: state.id, now });
    return;
  }
  document.body.dataset.page = "dashboard";
  if (!all.length) return;
  const uid = all.some((each) => each.uid === state.id) ? state.id : all[0].uid;
  if (state.id && uid !== state.id) { leave(); say(`There is no dashboard "${state.id}".`, "trouble"); drawTabs(); return; }
  if (!shown || shown.uid !== uid) await open(uid);
  if (!shown) return;
  drawTabs();
  await refresh({ variables: true });
}

let lastDashboard = "#/";

/** What stands around a page that is no dashboard: the way to the dashboards, and whether something fires. */
function around() {
  const { signal } = stopper;
  drawTabs();
  readRecords(signal);
  askAlerts(signal).then((found) => badge.show(found, now(), { records, recorded: isRecorded() }), () => {});
}

function readRecords(signal) {
  server.json("/api/violations", { signal }).then((found) => { records = found; violations.show(records); }, () => {});
}

function leave() {
  clearTimeout(timer);
  stopper.abort();
  stopper = new AbortController();
  shown?.dashboard.destroy();
  shown = null;
  document.querySelector("#bars").replaceChildren();
}

async function open(uid) {
  leave();
  const { signal } = stopper;
  say("Reading the dashboard …");
  try {
    const json = await server.json(`/api/dashboards/${encodeURIComponent(uid)}`, { signal });
    document.title = `${json.title} – Quiesce`;
    const dashboard = new Dashboard(json, root, { server, room, scrapeMs, range, rawRange: effective, now, onProblem: (message) => console.warn(message) });
    shown = { uid, json, dashboard };
    lastVariables = "";
    root.dataset.uid = uid;
    scrollTo(0, 0);
  } catch (error) {
    if (!isOutdated(error)) say(`The dashboard could not be read: ${error.message}`, "trouble");
  }
}

function drawTabs() {
  document.querySelector("#tabs").replaceChildren(...tabs(all, shown?.uid, { ...(state.page === "d" ? state : parse(lastDashboard)), ...(state.from === undefined ? {} : { from: state.from, to: state.to }) }));
}

let resolved = { list: [], values: {} };

function drawBars() {
  if (!shown) return;
  const bars = document.querySelector("#bars");
  if (bars.querySelector(":popover-open") || bars.contains(document.activeElement) && document.activeElement.tagName === "SELECT" && document.activeElement.matches(":active")) return;
  const focused = document.activeElement?.dataset?.variable;
  const { dashboard, json } = shown;
  bars.replaceChildren(
    ...variableBar(resolved.list, (name, values) => go({ variables: { ...state.variables, [name]: values } })),
    h("span", { class: "spacer" }),
    violations.element,
    ...eventBar(json, dashboard.off, (name, on) => { if (on) dashboard.off.delete(name); else dashboard.off.add(name); refresh(); }),
    ...linkBar(json, all, dashboard.context()));
  if (focused) bars.querySelector(`[data-variable="${CSS.escape(focused)}"]`)?.focus();
}

/** Ask everything anew; with `variables` also what there is to choose. */
async function refresh({ variables = false } = {}) {
  if (!shown) return;
  clearTimeout(timer);
  const { dashboard, json } = shown;
  const { signal } = stopper;
  const current = effective();
  picker.show(current);
  refresher.show(current.refresh);
  pinned = null;
  pinned = range();
  const started = now();
  try {
    if (variables || now() - variablesAt > VARIABLES_EVERY || !dashboard.ready || !resolved.list.length) {
      server.json("/api/info", { signal }).then((fresh) => { info = fresh; noteRuns(); }, () => {});
      readRecords(signal);
      const preferred = info.run ? { run: [info.run] } : {};
      const found = await resolveVariables(json.templating?.list ?? [], { server, range: pinned, wanted: state.variables, preferred, signal });
      if (signal.aborted || shown?.dashboard !== dashboard) return;
      variablesAt = now();
      resolved = found;
      const key = JSON.stringify([found.list.map(({ options, chosen }) => [options, chosen]), shown.uid, document.documentElement.dataset.theme]);
      if (key !== lastVariables) { lastVariables = key; dashboard.variables = found.values; drawBars(); }
    }
    noteRuns();
    const alerts = askAlerts(signal).then((found) => badge.show(found, now(), { records, recorded: isRecorded() }));
    await Promise.allSettled([dashboard.start(resolved.values), alerts]);
    if (problem.kind === "ok") freshAt = started;
    document.documentElement.dataset.freshAt = String(freshAt);
  } catch (error) {
    if (isOutdated(error)) return;
    if (error.kind !== "prometheus" && error.kind !== "server") say(`The variables of this dashboard could not be read: ${error.message}`, "trouble");
  } finally {
    pinned = null;
    if (shown?.dashboard === dashboard && !signal.aborted) plan(current.refresh);
  }
}

/** Whether nothing that is shown goes on, so that rules which are judged now say nothing about it. */
function isRecorded() {
  return !info.live && Boolean(info.from && info.to);
}

async function askAlerts(signal) {
  if (!isRecorded()) return readAlerts(await server.prometheus("alerts", {}, { signal }));
  return readAlertSeries(await server.prometheus("query", { query: 'ALERTS{alertname=~"Quiesce.*"}', time: String(range().to / 1000) }, { signal }));
}

function noteRuns() {
  const run = resolved.list.find(({ definition }) => definition.name === "run");
  const note = document.querySelector("#note");
  const { state: reading = "", problems = [] } = info.past ?? {};
  const none = run && !run.options.length;
  note.hidden = !none && !reading && !problems.length;
  note.textContent = [reading, ...problems].filter(Boolean).join("; ");
  if (none && !reading) note.textContent += " Prometheus has no run in this time range yet. Is one running with metrics on, and does the range reach back to it?";
}

function plan(interval) {
  const ms = refreshMs(interval);
  clearTimeout(timer);
  if (!ms || document.hidden || problem.kind !== "ok") return;
  timer = setTimeout(() => refresh(), ms);
}

async function start() {
  document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); root.focus(); });
  applyTheme(state.theme);
  themes.show();
  document.querySelector("#tools").append(badge.element, picker.element, refresher.element, themes.element);
  onSystemTheme(() => { if (applyTheme(state.theme)) { themes.show(); shown?.dashboard.redraw(); } });
  addEventListener("hashchange", () => route());
  document.addEventListener("visibilitychange", () => { if (!document.hidden && shown && state.page === "d" && refreshMs(effective().refresh)) refresh(); });
  // For those who look from outside: what was asked, and how many questions at once.
  window.quiesceView = { server, get dashboard() { return shown?.dashboard; } };
  try {
    [info, all] = await Promise.all([server.json("/api/info"), server.json("/api/dashboards")]);
  } catch (error) {
    say(error.message, "trouble");
    setTimeout(() => { location.reload(); }, 5000);
    return;
  }
  all = inOrder(all);
  if (info.now && Math.abs(info.now * 1000 - Date.now()) > 5000) clockShift = info.now * 1000 - Date.now();
  document.querySelector("#where").textContent = info.run ?? (info.run_dir ?? "").split("/").filter(Boolean).at(-1) ?? "";
  document.querySelector("#where").title = info.run_dir ?? "";
  document.querySelector("#where").dataset.kind = info.live ? "live" : "recorded";
  if (!all.length) { say("There are no dashboards.", "trouble"); return; }
  await route();
}

start();
