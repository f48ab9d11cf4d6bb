/**
 * The records of violated invariants: which invariant, of what, since when, with what evidence, open or closed, and what to
 * do. Rule: a record is a disclosure, so it opens by keyboard as any; one that is open, or has the focus, stays so when
 * the list is read anew.
 */

import { h, link } from "./dom.js";
import { localAddress } from "./state.js";
import { stamp } from "./timerange.js";
import { parts } from "./units.js";

const EVERY_MS = 5000;
const MOST_GROUPS = 20;

const SEEN_BY = { live: "an event, as it happened", sweep: "the auditor's sweep", cut: "the verification of a cut" };

/** What a record is about: the groups, or what its evidence names. */
export function subject({ groups = [], groups_total: total = groups.length, evidence = {} }) {
  if (total > 0) return total === 1 ? `group ${groups[0]}` : `${total} groups`;
  for (const name of ["worker", "phase", "hook", "check", "where"]) if (name in evidence) return `${name} ${evidence[name]}`;
  return "the run";
}

/** How long ago a moment in Unix seconds is. */
function ago(unix, now) {
  return `${parts(Math.max(1, now / 1000 - unix))} ago`;
}

/** The address of the page, at a record. */
export function violationsAddress(record) {
  return `#/violations/${record ? encodeURIComponent(nameOf(record)) : ""}`;
}

/** Names a record among those of several runs. */
const nameOf = (record) => `${record.run ?? ""} ${record.key}`.trim();

/** One line for a record, as it stands beside an alert. */
export function line(record, now) {
  return h("p", { class: "alert-record" }, link(violationsAddress(record), {}, `Record ${record.key}`), `: ${subject(record)}, seen ${ago(record.last_unix, now)}${record.evidence?.drill ? ", a drill" : ""}${record.open ? "" : ", closed"}`);
}

function chip(record) {
  if (!record.open) return h("span", { class: "state closed" }, "✓ closed");
  return h("span", { class: `state ${record.severity}` }, `▲ ${record.severity}`);
}

function pairs(rows) {
  return h("table", { class: "grid-table" }, h("tbody", {}, ...rows.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, ...[value].flat())))));
}

const text = (value) => (typeof value === "object" ? JSON.stringify(value) : String(value));

function detail(record, now) {
  const { groups = [], groups_total: total = groups.length, owners = [], evidence = {}, events = [] } = record;
  const more = total - Math.min(groups.length, MOST_GROUPS);
  const known = Object.entries(evidence).filter(([name]) => name !== "drill");
  return h("div", { class: "violation-detail" },
    evidence.drill ? h("p", { class: "quiet" }, `The drill ${evidence.drill} caused it, on purpose.`) : null,
    h("div", { class: "violation-parts" },
      h("div", {}, h("h4", {}, "The record"), pairs([
        ["key", record.key], ["run", record.run], ["subject", subject(record)],
        ["groups", groups.length ? `${groups.slice(0, MOST_GROUPS).join(", ")}${more > 0 ? ` and ${more} more` : ""}` : ""],
        ["owners", owners.join(", ")], ["seen by", SEEN_BY[record.origin] ?? record.origin],
        ["first seen", `${stamp(record.first_unix * 1000)} (${ago(record.first_unix, now)})`], ["last seen", `${stamp(record.last_unix * 1000)} (${ago(record.last_unix, now)})`],
        ["times", record.count], ["start of the run", record.incarnation], ["cut", record.cut_id],
        ["trace", record.trace_id ? h("a", { href: `#/trace/${record.trace_id}` }, `${record.trace_id.slice(0, 8)}…`) : ""],
      ])),
      h("div", {}, h("h4", {}, "Evidence"), known.length ? pairs(known.map(([name, value]) => [name, text(value)])) : h("p", { class: "quiet" }, "The message says it all."),
        events.length ? h("h4", {}, "The last events of its groups") : null,
        events.length ? pairs(events.slice(-12).map((event) => [event.group_id ?? "", `${event.source ?? "?"} → ${event.target ?? "?"}${event.reason ? ` (${event.reason})` : ""}`])) : null)),
    h("p", {}, record.runbook ? link(localAddress(record.runbook), { class: "runbook" }, `Runbook: ${record.alert}`) : null),
    record.open ? h("p", { class: "quiet" }, "It stays open, over resumes too, until somebody closes it: ", h("code", {}, `quiesce violations ${record.folder} --close ${record.key}`)) : null);
}

function item(record, opened, now) {
  const name = nameOf(record);
  const box = h("details", { class: "violation", open: opened.has(name), data: { key: record.key, name, invariant: record.invariant, open: record.open ? "yes" : "no", severity: record.severity } },
    h("summary", {}, chip(record), h("span", { class: "violation-name" }, record.invariant), h("span", { class: "violation-message" }, record.message), h("span", { class: "quiet violation-when" }, `${record.count > 1 ? `${record.count} times, ` : ""}since ${stamp(record.first_unix * 1000).slice(5)}`)),
    detail(record, now));
  box.addEventListener("toggle", () => { if (box.open) opened.add(name); else opened.delete(name); });
  return box;
}

/** Show the records in `root`, and keep them fresh until `signal` fires. `wanted` is the record to open. */
export async function showViolations(root, { server, back, signal, wanted, now }) {
  const opened = new Set(wanted ? [wanted] : []);
  const body = h("div", {});
  const heading = h("h2", { tabindex: "-1" }, "Violations");
  root.replaceChildren(h("div", { class: "violations" }, h("a", { class: "back", href: back }, "‹ Back to the dashboard"), heading, h("p", { class: "quiet" }, "Every time that an invariant was seen violated in this run, with its evidence; the same fault is one record, however often it is seen. They are in violations.jsonl of the run folder."), body));
  let before = "";
  const read = async () => {
    let records;
    try {
      records = await server.json("/api/violations", { signal });
    } catch (error) {
      if (error.name !== "AbortError" && !before) body.replaceChildren(h("p", { class: "trouble", role: "alert" }, error.message));
      return;
    }
    const key = JSON.stringify(records);
    if (key === before) return;
    before = key;
    const focused = document.activeElement?.closest?.(".violation")?.dataset.name;
    const [open, closed] = [records.filter((each) => each.open), records.filter((each) => !each.open)];
    body.replaceChildren(
      h("h3", {}, open.length ? `${open.length} open` : "None is open."), ...open.map((each) => item(each, opened, now())),
      ...(closed.length ? [h("h3", {}, `${closed.length} closed`), ...closed.map((each) => item(each, opened, now()))] : []));
    if (focused) [...body.querySelectorAll(".violation")].find((each) => each.dataset.name === focused)?.querySelector("summary").focus();
  };
  await read();
  const target = wanted && [...body.querySelectorAll(".violation")].find((each) => each.dataset.name === wanted);
  if (target) { target.scrollIntoView({ block: "nearest" }); target.querySelector("summary").focus(); } else heading.focus();
  const timer = setInterval(() => { if (!document.hidden) read(); }, EVERY_MS);
  signal.addEventListener("abort", () => clearInterval(timer), { once: true });
}

/** The link in the header that says how many records are open; it is not there if none is. `show(records)` fills it. */
export function violationLink() {
  const element = h("a", { class: "badge violations-link", href: violationsAddress(), hidden: true, data: { open: "0" } });
  const show = (records) => {
    const open = records.filter((each) => each.open);
    element.hidden = !open.length;
    element.dataset.open = String(open.length);
    element.dataset.state = open.some(({ severity }) => severity === "critical") ? "critical" : "warning";
    element.textContent = `${open.length} open violation${open.length === 1 ? "" : "s"}`;
    element.title = [...new Set(open.map(({ invariant }) => invariant))].join(", ");
  };
  return { element, show };
}
