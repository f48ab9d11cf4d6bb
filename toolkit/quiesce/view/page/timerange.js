/**
 * Time ranges as Grafana writes them: `now`, `now-15m`, `now/d`, milliseconds, seconds or an ISO date. Pure.
 */

/** Milliseconds of a unit of a relative time. */
export const UNITS = { ms: 1, s: 1e3, m: 60e3, h: 3600e3, d: 86400e3, w: 7 * 86400e3, M: 30 * 86400e3, y: 365 * 86400e3 };

/** What the list of quick ranges offers: each ends now. */
export const QUICK = [
  ["now-5m", "Last 5 minutes"],
  ["now-15m", "Last 15 minutes"],
  ["now-30m", "Last 30 minutes"],
  ["now-1h", "Last hour"],
  ["now-3h", "Last 3 hours"],
  ["now-6h", "Last 6 hours"],
  ["now-12h", "Last 12 hours"],
  ["now-24h", "Last 24 hours"],
  ["now-2d", "Last 2 days"],
  ["now-7d", "Last 7 days"],
];

/** Parse a duration such as `15s`, `1h30m` or `500ms` into milliseconds; NaN when it is none. */
export function duration(text) {
  const whole = String(text ?? "").trim();
  if (!/^(\d+(?:\.\d+)?(ms|[smhdwMy]))+$/.test(whole)) return NaN;
  let total = 0;
  for (const [, number, unit] of whole.matchAll(/(\d+(?:\.\d+)?)(ms|[smhdwMy])/g)) total += Number(number) * UNITS[unit];
  return total;
}

/** Write milliseconds as the shortest exact duration of one unit, as Grafana does for `$__interval`. */
export function durationText(ms) {
  for (const unit of ["y", "w", "d", "h", "m", "s"]) if (ms >= UNITS[unit] && ms % UNITS[unit] === 0) return `${ms / UNITS[unit]}${unit}`;
  return `${Math.max(1, Math.round(ms))}ms`;
}

function startOf(date, unit) {
  const day = new Date(date.getFullYear(), date.getMonth(), date.getDate());
  if (unit === "d") return day;
  if (unit === "w") return new Date(day.getFullYear(), day.getMonth(), day.getDate() - ((day.getDay() + 6) % 7));
  if (unit === "M") return new Date(day.getFullYear(), day.getMonth(), 1);
  if (unit === "y") return new Date(day.getFullYear(), 0, 1);
  return new Date(Math.floor(date.getTime() / UNITS[unit]) * UNITS[unit]);
}

/**
 * Milliseconds since 1970 of one end of a range; NaN when it cannot be read.
 * `end` rounds `now/d` up to the end of the day instead of its start.
 */
export function moment(text, now, end = false) {
  const words = String(text ?? "").trim();
  const relative = /^now((?:[+-]\d+(?:ms|[smhdwMy]))*)(?:\/([smhdwMy]))?$/.exec(words);
  if (relative) {
    let at = now;
    for (const [, sign, number, unit] of relative[1].matchAll(/([+-])(\d+)(ms|[smhdwMy])/g)) at += (sign === "-" ? -1 : 1) * Number(number) * UNITS[unit];
    if (!relative[2]) return at;
    const start = startOf(new Date(at), relative[2]);
    if (!end) return start.getTime();
    return startOf(new Date(start.getTime() + 1.5 * UNITS[relative[2]]), relative[2]).getTime() - 1;
  }
  if (/^-?\d+(\.\d+)?$/.test(words)) return Math.abs(Number(words)) < 1e11 ? Number(words) * 1e3 : Number(words);
  return words ? Date.parse(words.replace(" ", "T")) : NaN;
}

/** Both ends in milliseconds, or null when they make no range. */
export function resolve(range, now) {
  const from = moment(range.from, now);
  const to = moment(range.to, now, true);
  return Number.isFinite(from) && Number.isFinite(to) && to > from ? { from, to } : null;
}

/** Whether a range moves with the clock. */
export function isRelative(range) {
  return /^now/.test(String(range.to));
}

/** A range twice as wide around the same middle, never past now. */
export function zoomedOut({ from, to }, now) {
  const width = to - from;
  const end = Math.min(to + width / 2, Math.max(now, to));
  return { from: Math.round(end - 2 * width), to: Math.round(end) };
}

/** A range moved by half its width, into the past (-1) or the future (1). */
export function shifted({ from, to }, direction) {
  const by = (direction * (to - from)) / 2;
  return { from: Math.round(from + by), to: Math.round(to + by) };
}

/** The narrowest quick range that shows a run from its start on, but not a wider one than `widest`. */
export function covering(startMs, now, widest) {
  const limit = now - (moment(widest, now) || now - UNITS.h);
  for (const [from] of QUICK) {
    const width = now - moment(from, now);
    if (width >= limit) break;
    if (now - startMs <= width) return from;
  }
  return widest;
}

const two = (number) => String(number).padStart(2, "0");

/** Local time of a moment, as `2026-05-01 13:04:05`. */
export function stamp(ms) {
  const date = new Date(ms);
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${clock(ms)}`;
}

/** Local time of day of a moment. */
export function clock(ms) {
  const date = new Date(ms);
  return `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

/** What the button of the time picker says. */
export function rangeText(range, now) {
  const quick = range.to === "now" && QUICK.find(([from]) => from === range.from);
  if (quick) return quick[1];
  if (isRelative(range) && /^now-\w+$/.test(range.from) && range.to === "now") return `Last ${range.from.slice(4)}`;
  const ends = resolve(range, now);
  if (!ends) return "no range";
  const sameDay = stamp(ends.from).slice(0, 10) === stamp(ends.to).slice(0, 10);
  return `${stamp(ends.from)} to ${sameDay ? clock(ends.to) : stamp(ends.to)}`;
}

const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800].map((s) => s * 1e3);

/** Ticks of a time axis in local time: at most `most` of them, on round times. */
export function timeTicks(from, to, most) {
  const step = STEPS.find((each) => (to - from) / each <= Math.max(2, most)) ?? STEPS.at(-1) * Math.ceil((to - from) / STEPS.at(-1) / most);
  const shift = new Date(from).getTimezoneOffset() * 60e3;
  const values = [];
  for (let at = Math.ceil((from - shift) / step) * step + shift; at <= to; at += step) values.push(at);
  const days = step >= 86400e3;
  const long = to - from > 86400e3;
  const texts = values.map((at) => {
    const date = stamp(at).slice(5, 10);
    if (days) return date;
    const time = step < 60e3 ? clock(at) : clock(at).slice(0, 5);
    return long ? `${date} ${time}` : time;
  });
  return { values, texts };
}
