/**
 * Variables of a dashboard: what they may be, what is chosen. Rule: a variable is resolved after those that it uses.
 */

import { interpolate, used } from "./interpolate.js";
import { ofRange } from "./intervals.js";

/** What stands in an address for every value. */
export const ALL = "$__all";

const textOf = (query) => (typeof query === "string" ? query : query?.query ?? "");

/** Split `label_values(metric, label)` into {match, label}; null when it is another query. */
export function labelValues(query) {
  const inside = /^label_values\(\s*(?:(.+?)\s*,\s*)?([a-zA-Z_]\w*)\s*\)$/s.exec(textOf(query).trim());
  return inside ? { match: inside[1] ?? null, label: inside[2] } : null;
}

/** Apply a variable's own `regex` and `sort` to what was found. */
export function options(values, definition) {
  let found = [...new Set(values)];
  const regex = /^\/(.*)\/([a-z]*)$/s.exec(definition.regex ?? "");
  if (regex) {
    const pattern = new RegExp(regex[1], regex[2].replace("g", ""));
    found = [...new Set(found.map((value) => pattern.exec(value)).filter(Boolean).map((match) => match[1] ?? match[0]))];
  }
  const compare = (one, two) => one.localeCompare(two, "en", { numeric: definition.sort >= 3, sensitivity: definition.sort >= 5 ? "base" : "variant" });
  if (definition.sort) found.sort(definition.sort % 2 ? compare : (one, two) => compare(two, one));
  return found;
}

/** The definitions in an order in which each comes after those that it uses. */
export function inOrder(definitions) {
  const names = new Set(definitions.map(({ name }) => name));
  const done = [];
  const left = [...definitions];
  while (left.length) {
    const ready = left.findIndex((each) => [...used(textOf(each.query))].every((name) => !names.has(name) || name === each.name || done.some((before) => before.name === name)));
    done.push(...left.splice(Math.max(ready, 0), 1));
  }
  return done;
}

/**
 * Choose values: those of the address if they (still) exist, else the preferred ones, else what the dashboard was saved
 * with, else all, else the first one.
 */
export function choose(definition, found, wanted, preferred) {
  const { multi = false, includeAll = false, allValue = null, current } = definition;
  const made = (values, all = false) => ({ value: multi || all ? values : values[0] ?? "", all, multi, includeAll, allValue: allValue || null });
  const every = () => made(found.length ? found : [""], true);
  for (const list of [wanted, preferred, [current?.value].flat()]) {
    const values = (list ?? []).filter((value) => value !== undefined && value !== null);
    if (includeAll && values.includes(ALL)) return every();
    const there = values.filter((value) => found.includes(value));
    if (there.length) return made(multi ? there : there.slice(0, 1));
  }
  return includeAll ? every() : made(found.slice(0, 1));
}

async function find(definition, values, { server, range, signal }) {
  const { type, query } = definition;
  if (type === "custom" || type === "interval") return textOf(query).split(",").map((value) => value.trim()).filter(Boolean);
  if (type === "constant" || type === "textbox") return [textOf(query)];
  if (type !== "query") return [];
  const text = interpolate(textOf(query), { ...values, ...ofRange(range) });
  const time = { start: String(range.from / 1000), end: String(range.to / 1000) };
  const labels = labelValues(text);
  if (labels) return server.prometheus(`label/${labels.label}/values`, labels.match ? { "match[]": labels.match, ...time } : time, { signal });
  const result = /^query_result\((.*)\)$/s.exec(text.trim());
  if (result) {
    const data = await server.prometheus("query", { query: result[1], time: String(range.to / 1000) }, { signal });
    return data.result.map(({ metric: { __name__: name = "", ...rest }, value }) => `${name}{${Object.entries(rest).map(([key, each]) => `${key}="${each}"`).join(",")}} ${value[1]}`);
  }
  throw new Error(`the query of variable ${definition.name} is not known to this page: ${text}`);
}

/**
 * Resolve every variable of a dashboard.
 *
 * `wanted`: values by name from the address. `preferred`: values by name that the server suggests. `fixed`: variables that
 * the server decides (data sources), by name. Returns a list of {definition, options, chosen}, in the dashboard's order.
 */
export async function resolve(definitions, { server, range, wanted = {}, preferred = {}, fixed = {}, signal }) {
  const values = { ...fixed };
  const found = new Map();
  for (const definition of inOrder(definitions)) {
    if (definition.type === "datasource") { values[definition.name] ??= "prometheus"; continue; }
    if (definition.type === "adhoc") continue;
    const all = options(await find(definition, values, { server, range, signal }), definition);
    const chosen = choose(definition, all, wanted[definition.name], preferred[definition.name]);
    values[definition.name] = chosen;
    found.set(definition.name, { definition, options: all, chosen });
  }
  return { values, list: definitions.map(({ name }) => found.get(name)).filter(Boolean) };
}

/** What stands in the address for a choice. */
export function inAddress(chosen) {
  return chosen.all ? [ALL] : [chosen.value].flat();
}
