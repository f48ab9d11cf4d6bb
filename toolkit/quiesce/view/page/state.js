/**
 * What the page shows, as its address: `#/d/<uid>?from=now-15m&to=now&var-run=x&refresh=5s&theme=dark`, `#/trace/<id>`,
 * `#/violations/<record>`. Pure.
 *
 * Rule: the address says everything, so a link, a reload and the back button all show the same.
 */

import { duration } from "./timerange.js";

/** Read an address's fragment: {page, id, from, to, refresh, theme, variables}. What it does not say is undefined. */
export function parse(hash) {
  const [path, query = ""] = String(hash ?? "").replace(/^#/, "").split("?");
  const parts = path.split("/").filter(Boolean);
  const given = new URLSearchParams(query);
  const variables = {};
  for (const name of new Set(given.keys())) if (name.startsWith("var-")) variables[name.slice(4)] = given.getAll(name);
  const page = ["trace", "violations"].includes(parts[0]) ? parts[0] : "d";
  const from = given.get("from") ?? undefined;
  const to = given.get("to") ?? undefined;
  return {
    page,
    id: parts[1] ? decodeURIComponent(parts[1]) : undefined,
    from: from && to ? from : undefined,
    to: from && to ? to : undefined,
    refresh: given.has("refresh") ? given.get("refresh") : undefined,
    theme: ["dark", "light"].includes(given.get("theme")) ? given.get("theme") : undefined,
    variables,
  };
}

/** The fragment of a state. */
export function write({ page = "d", id = "", from, to, refresh, theme, variables = {} }) {
  const query = new URLSearchParams();
  if (from !== undefined && to !== undefined) { query.set("from", from); query.set("to", to); }
  for (const [name, values] of Object.entries(variables)) for (const value of [values].flat()) query.append(`var-${name}`, value);
  if (refresh !== undefined) query.set("refresh", refresh);
  if (theme) query.set("theme", theme);
  const text = query.toString();
  return `#/${page}/${encodeURIComponent(id)}${text ? `?${text}` : ""}`;
}

/** Milliseconds between refreshes; 0 for none. */
export function refreshMs(text) {
  const ms = duration(text);
  return Number.isFinite(ms) ? Math.max(1000, ms) : 0;
}

/**
 * An address from a dashboard's JSON as one of this page: `/d/<uid>/…?from=…` becomes its fragment, a runbook of the
 * documentation this server's copy. Anything else stays.
 */
export function localAddress(url) {
  const text = String(url ?? "");
  const dashboard = /^(?:https?:\/\/[^/]+)?\/?d\/([\w-]+)(?:\/[^?]*)?(?:\?(.*))?$/.exec(text);
  if (dashboard) return write({ ...parse(`#/d/${dashboard[1]}?${dashboard[2] ?? ""}`) });
  const runbook = /\/runbooks\/(\w+?)(?:\.html|\.md|\/)?(?:#.*)?$/.exec(text);
  if (runbook) return `/runbooks/${runbook[1]}`;
  return text;
}
