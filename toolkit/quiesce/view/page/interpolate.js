/**
 * Puts variables into text: `$name`, `${name}`, `${name:format}` and `[[name]]`, as Grafana does. Pure.
 *
 * A value is {value: string | string[], multi: bool, all: bool, allValue: string | null}. In a PromQL text a variable
 * that may have several values becomes a regular expression, so it is always matched with =~.
 */

const PATTERN = /\$(\w+)|\$\{(\w+)(?:\.([^:^}]+))?(?::([^}]+))?\}|\[\[(\w+)(?::([^\]]+))?\]\]/g;

/** Escape for a regular expression inside a PromQL string. */
export function escapeRegex(text) {
  return String(text).replace(/\\/g, "\\\\\\\\").replace(/[$^*{}[\]'+?.()|]/g, "\\\\$&").replace(/"/g, '\\"');
}

const escapeString = (text) => String(text).replace(/\\/g, "\\\\").replace(/"/g, '\\"');

const FORMATS = {
  raw: (values) => values.join(","),
  regex: (values) => (values.length === 1 ? plainRegex(values[0]) : `(${values.map(plainRegex).join("|")})`),
  pipe: (values) => values.join("|"),
  csv: (values) => values.join(","),
  distributed: (values) => values.join(","),
  glob: (values) => (values.length === 1 ? values[0] : `{${values.join(",")}}`),
  text: (values) => values.join(" + "),
  percentencode: (values) => encodeURIComponent(values.join(",")),
  doublequote: (values) => values.map((value) => `"${value.replace(/"/g, '\\"')}"`).join(","),
  singlequote: (values) => values.map((value) => `'${value.replace(/'/g, "\\'")}'`).join(","),
  json: (values) => JSON.stringify(values.length === 1 ? values[0] : values),
};

function plainRegex(text) {
  return String(text).replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&");
}

/** What a variable becomes in PromQL. */
export function promql(variable) {
  const values = [variable.value].flat().map(String);
  if (variable.all && variable.allValue) return variable.allValue;
  if (!variable.multi && !variable.includeAll) return values.map(escapeString).join(",");
  const escaped = values.map(escapeRegex);
  return escaped.length === 1 ? escaped[0] : `(${escaped.join("|")})`;
}

/** What a variable becomes in ordinary text. */
function words(variable) {
  const values = [variable.value].flat().map(String);
  return values.length === 1 ? values[0] : `{${values.join(",")}}`;
}

/**
 * Replace every known variable; an unknown one is left as it is.
 *
 * `variables`: by name, a string (a built-in) or a value as above. `plain`: how a variable without a format is written;
 * the default is PromQL. `extra(name, path, format)` answers what is no variable (`__value.raw`, `__data.fields.x`).
 */
export function interpolate(text, variables, { plain = promql, extra = null } = {}) {
  return String(text ?? "").replace(PATTERN, (whole, a, b, path, bFormat, c, cFormat) => {
    const name = a ?? b ?? c;
    const format = bFormat ?? cFormat;
    if (extra) {
      const own = extra(name, path, format);
      if (own !== undefined) return format === "percentencode" ? encodeURIComponent(own) : String(own);
    }
    const variable = variables[name];
    if (variable === undefined) return whole;
    if (typeof variable === "string") return variable;
    if (format === "queryparam") return queryPart(name, variable);
    if (!format) return plain(variable);
    if (variable.all && variable.allValue) return variable.allValue;
    return (FORMATS[format] ?? FORMATS.glob)([variable.value].flat().map(String));
  });
}

/** In text for people: the values themselves. */
export function interpolateText(text, variables, extra = null) {
  return interpolate(text, variables, { plain: words, extra });
}

/** `var-name=value&…` of one variable, as it stands in an address. */
export function queryPart(name, variable) {
  if (variable.all) return `var-${encodeURIComponent(name)}=${encodeURIComponent("$__all")}`;
  return [variable.value].flat().map((value) => `var-${encodeURIComponent(name)}=${encodeURIComponent(value)}`).join("&");
}

/** Names of the variables that a text uses. */
export function used(text) {
  return new Set([...String(text ?? "").matchAll(PATTERN)].map(([, a, b, , , c]) => a ?? b ?? c));
}
