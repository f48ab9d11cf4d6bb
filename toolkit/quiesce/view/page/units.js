/**
 * Values as people read them, in Grafana's units. Pure. `format(value, unit, decimals)` returns the text.
 */

const fixed = (value, digits) => {
  const text = value.toFixed(Math.max(0, Math.min(12, digits)));
  return /^-0(\.0*)?$/.test(text) ? text.slice(1) : text;
};

/** Digits after the point that show three significant ones; whole numbers have none. */
export function autoDigits(value) {
  const size = Math.abs(value);
  if (size === 0 || Number.isInteger(value)) return 0;
  return Math.max(0, 2 - Math.floor(Math.log10(size) + 1e-12));
}

function number(value, decimals) {
  return fixed(value, decimals ?? autoDigits(value));
}

/** As `number`, but without zeros at the end. */
function lean(value, decimals) {
  const text = number(value, decimals);
  return decimals === undefined ? text.replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "") : text;
}

function scaled(factor, names, space = " ") {
  return (value, decimals) => {
    let at = 0;
    let size = value;
    while (Math.abs(size) >= factor && at < names.length - 1) { size /= factor; at += 1; }
    return names[at] ? `${number(size, decimals)}${space}${names[at]}` : number(size, decimals);
  };
}

const TIMES = [[1e-6, "ns", 1e9], [1e-3, "µs", 1e6], [1, "ms", 1e3], [60, "s", 1], [3600, "min", 1 / 60], [86400, "hour", 1 / 3600], [604800, "day", 1 / 86400], [31536000, "week", 1 / 604800], [Infinity, "year", 1 / 31536000]];

/** Seconds in the unit that fits. */
export function seconds(value, decimals) {
  if (value === 0) return `${fixed(0, decimals ?? 0)} s`;
  const [, name, factor] = TIMES.find(([below]) => Math.abs(value) < below);
  const size = value * factor;
  const many = ["hour", "day", "week", "year"].includes(name) && fixed(size, decimals ?? autoDigits(size)) !== "1" ? "s" : "";
  return `${fixed(size, decimals ?? autoDigits(size))} ${name}${many}`;
}

/** Seconds as parts, `1 h 4 min 3 s`; the first `most` of them. */
export function parts(value, most = 2) {
  const sign = value < 0 ? "-" : "";
  let left = Math.abs(value);
  if (left < 1) return seconds(value);
  const found = [];
  for (const [name, size] of [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]]) {
    const whole = name === "s" ? Math.round(left) : Math.floor(left / size + 1e-9);
    left -= whole * size;
    if (whole || (found.length && found.length < most)) found.push(`${whole} ${name}`);
    if (found.length >= most) break;
  }
  while (found.length > 1 && found.at(-1).startsWith("0 ")) found.pop();
  return sign + found.join(" ");
}

const two = (value) => String(value).padStart(2, "0");

function clockOf(value) {
  const whole = Math.round(Math.abs(value));
  return `${value < 0 ? "-" : ""}${two(Math.floor(whole / 3600))}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
}

/** How long ago a moment in ms is, in words. */
export function fromNow(ms, now) {
  const away = (now - ms) / 1000;
  const text = parts(Math.abs(away) < 1 ? Math.sign(away || 1) * Math.round(Math.abs(away)) : Math.abs(away), 2).replace("-", "");
  if (Math.abs(away) < 1) return "now";
  return away > 0 ? `${text} ago` : `in ${text}`;
}

function local(ms) {
  const date = new Date(ms);
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

const short = scaled(1000, ["", "K", "Mil", "Bil", "Tri", "Quadr"]);
const suffix = (text, base = lean) => (value, decimals) => `${base(value, decimals)}${text}`;
const rate = (text) => (value, decimals) => `${short(value, decimals)} ${text}`;

const UNITS = {
  none: lean,
  "": lean,
  short,
  string: (value) => String(value),
  percent: (value, decimals) => `${lean(value, decimals)}%`,
  percentunit: (value, decimals) => `${lean(value * 100, decimals)}%`,
  s: seconds,
  ms: (value, decimals) => seconds(value / 1e3, decimals),
  µs: (value, decimals) => seconds(value / 1e6, decimals),
  ns: (value, decimals) => seconds(value / 1e9, decimals),
  m: (value, decimals) => seconds(value * 60, decimals),
  h: (value, decimals) => seconds(value * 3600, decimals),
  d: (value, decimals) => seconds(value * 86400, decimals),
  dtdurations: (value) => parts(value, 3),
  dtdurationms: (value) => parts(value / 1e3, 3),
  dthms: clockOf,
  clocks: (value) => parts(value, 3),
  bytes: scaled(1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]),
  decbytes: scaled(1000, ["B", "kB", "MB", "GB", "TB", "PB"]),
  Bps: scaled(1000, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s", "PB/s"]),
  binBps: scaled(1024, ["B/s", "KiB/s", "MiB/s", "GiB/s", "TiB/s", "PiB/s"]),
  bits: scaled(1024, ["b", "Kib", "Mib", "Gib", "Tib"]),
  ops: rate("ops/s"),
  reqps: rate("req/s"),
  rps: rate("reads/s"),
  wps: rate("writes/s"),
  iops: rate("io/s"),
  cps: rate("c/s"),
  eps: rate("events/s"),
  mps: rate("messages/s"),
  opm: rate("ops/min"),
  hertz: scaled(1000, ["Hz", "kHz", "MHz", "GHz", "THz"]),
  celsius: suffix(" °C"),
  watt: scaled(1000, ["W", "kW", "MW", "GW"]),
  bool: (value) => (value ? "True" : "False"),
  bool_yes_no: (value) => (value ? "Yes" : "No"),
  bool_on_off: (value) => (value ? "On" : "Off"),
  dateTimeAsIso: local,
  dateTimeAsIsoNoDateIfToday: (value, _, now) => (local(value).slice(0, 10) === local(now).slice(0, 10) ? local(value).slice(11) : local(value)),
  dateTimeAsLocal: local,
  dateTimeAsSystem: local,
  dateTimeFromNow: (value, _, now) => fromNow(value, now),
  sci: (value, decimals) => value.toExponential(decimals ?? 2),
  locale: (value, decimals) => value.toLocaleString("en", { maximumFractionDigits: decimals ?? 3 }),
};

/** Whether the page has a formatter of its own for a unit. */
export function knows(unit) {
  return unit === undefined || unit === null || unit in UNITS || /^(suffix|prefix|time|si|currency\w*):?/.test(unit);
}

/** A value in a unit; `now` (ms) is for those that count from now. */
export function format(value, unit = "", decimals = undefined, now = Date.now()) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "+Inf" : "-Inf";
  const digits = decimals === null ? undefined : decimals;
  const known = UNITS[unit];
  if (known) return known(value, digits, now);
  if (unit?.startsWith("suffix:")) return `${short(value, digits)} ${unit.slice(7).trim()}`;
  if (unit?.startsWith("prefix:")) return `${unit.slice(7)}${short(value, digits)}`;
  if (unit?.startsWith("si:")) return scaled(1000, ["", "k", "M", "G", "T"].map((name) => name + unit.slice(3)))(value, digits);
  if (unit?.startsWith("time:")) return local(value);
  // An unknown id is shown as Grafana does: as a suffix.
  return unit ? `${short(value, digits)} ${unit}` : lean(value, digits);
}

/** Whether a unit means a point in time. */
export function isMoment(unit) {
  return /^(dateTime|time:)/.test(unit ?? "");
}

const SECOND_STEPS = [1e-9, 2e-9, 5e-9, 1e-8, 2e-8, 5e-8, 1e-7, 2e-7, 5e-7, 1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];

function niceStep(rough, unit) {
  const time = unit === "s" || unit === "dtdurations" ? SECOND_STEPS.find((step) => step >= rough * 0.999) : undefined;
  if (time) return time;
  if ((unit === "bytes" || unit === "binBps") && rough >= 1) return 2 ** Math.ceil(Math.log2(rough) - 1e-9);
  const ten = 10 ** Math.floor(Math.log10(rough));
  const left = rough / ten;
  return ten * (left <= 1.001 ? 1 : left <= 2.001 ? 2 : left <= 5.001 ? 5 : 10);
}

/** A linear axis that holds `low` to `high`: {low, high, values, texts}. Steps are round in the unit. */
export function linearTicks(low, high, unit, most, { decimals, fixedLow = false, fixedHigh = false, whole = false } = {}) {
  if (!(high > low)) {
    const room = (Math.abs(high) || 1) * 0.5;
    if (!fixedLow && low !== 0) low -= room;
    if (!fixedHigh || !(high > low)) high = Math.max(high, low) + room;
  }
  let step = niceStep((high - low) / Math.max(1, most), unit);
  if (whole && step < 1) step = 1;
  if (!fixedLow) low = Math.floor(low / step + 1e-9) * step;
  if (!fixedHigh) high = Math.ceil(high / step - 1e-9) * step;
  const values = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-6; n += 1) values.push(Number((n * step).toPrecision(12)));
  return { low, high, values, texts: tickTexts(values, unit, decimals) };
}

// In as few digits as say each value exactly.
function tickTexts(values, unit, decimals) {
  const exact = (digits) => values.every((value) => Math.abs(parseFloat(format(value, unit, digits)) - parseFloat(format(value, unit, 8))) < 1e-7);
  const digits = decimals ?? [0, 1, 2, 3, 4].find(exact);
  const texts = values.map((value) => format(value, unit, value === 0 ? 0 : digits));
  return (decimals ?? null) === null ? texts.map((text) => text.replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "")) : texts;
}

// A decade of seconds that people know under another name: a minute, ten, an hour.
function timely(value, unit) {
  return unit === "s" ? { 100: 60, 1000: 600, 10000: 3600, 100000: 86400 }[Math.round(value)] ?? value : value;
}

/** A logarithmic axis: values are powers of the base. */
export function logTicks(low, high, unit, most, base = 10) {
  const of = (value) => Math.log(value) / Math.log(base);
  const first = Math.floor(of(low) + 1e-9);
  const last = Math.max(first + 1, Math.ceil(of(high) - 1e-9));
  const every = Math.max(1, Math.ceil((last - first) / most));
  const values = [];
  for (let power = Math.ceil(first / every) * every; power <= last; power += every) values.push(timely(base ** power, unit));
  return { low: base ** first, high: base ** last, values, texts: values.map((value) => format(Number(value.toPrecision(6)), unit, 0)) };
}
