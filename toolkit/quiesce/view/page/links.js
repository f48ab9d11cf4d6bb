/** Links of dashboards, panels and fields, with their variables filled in and pointing into this page where they can. */

import { interpolateText, queryPart } from "./interpolate.js";
import { localAddress } from "./state.js";

function builtin(name, { variables, range, raw = range }) {
  if (name === "__url_time_range") return `from=${encodeURIComponent(raw.from)}&to=${encodeURIComponent(raw.to)}`;
  if (name === "__all_variables") return Object.entries(variables).filter(([, value]) => typeof value === "object").map(([key, value]) => queryPart(key, value)).join("&");
  return undefined;
}

function find(path, name, { value, text, labels = {}, row = {}, series = "" }) {
  const full = path ? `${name}.${path}` : name;
  if (full === "__value.raw" || full === "__value") return value;
  if (full === "__value.text" || full === "__value.numeric") return text ?? value;
  if (full === "__value.time") return row.Time;
  if (full === "__series.name" || full === "__field.name") return series;
  const label = /^__field\.labels\.(.+)$/.exec(full) ?? /^__field\.labels\["(.+)"\]$/.exec(full);
  if (label) return labels[label[1]] ?? "";
  const field = /^__data\.fields\.(.+)$/.exec(full) ?? /^__data\.fields\["?(.+?)"?\]$/.exec(full);
  if (field) return row[field[1]] ?? "";
  return undefined;
}

/** Fill in an address of a dashboard's JSON. */
export function fillAddress(url, context) {
  // ${__data.fields["alert name"]} has characters that a plain variable has not.
  const quoted = String(url).replace(/\$\{(__data\.fields|__field\.labels)\["([^"]+)"\](?::([^}]+))?\}/g, (_, base, key) => encodeURIComponent(find(`${base.split(".")[1]}.${key}`, base.split(".")[0], context) ?? ""));
  const text = interpolateText(quoted, context.variables ?? {}, (name, path, format) => builtin(name, context) ?? find(path, name, context));
  return localAddress(text);
}

/** The links of a field's value: [{title, href}]. */
export function fieldLinks(field, context) {
  return (field.config.links ?? []).filter(({ url }) => url).map(({ title, url }) => ({ title: interpolateText(title ?? "", context.variables ?? {}, (name, path) => find(path, name, context)), href: fillAddress(url, context) }));
}
