/**
 * Steps of queries and the variables that come from them, as Grafana computes them for Prometheus. Pure.
 *
 * The interval is the range divided by the pixels that there are, rounded to a round time, and never finer than the
 * scrape interval. The window of a rate holds at least four scrapes, so that it always has two samples.
 */

import { duration, durationText } from "./timerange.js";

/** Prometheus refuses a range query of more points. */
export const MOST_POINTS = 11000;

// Up to this bound (exclusive), the rounded interval; milliseconds.
const ROUND = [
  [10, 1], [15, 10], [35, 20], [75, 50], [150, 100], [350, 200], [750, 500], [1500, 1000], [3500, 2000], [7500, 5000],
  [12500, 10e3], [17500, 15e3], [25e3, 20e3], [45e3, 30e3], [90e3, 60e3], [210e3, 120e3], [450e3, 300e3],
  [750e3, 600e3], [1050e3, 900e3], [1500e3, 1200e3], [2700e3, 1800e3], [5400e3, 3600e3], [9000e3, 7200e3],
  [16200e3, 10800e3], [32400e3, 21600e3], [86400e3, 43200e3], [604800e3, 86400e3], [1814400e3, 604800e3],
  [3628800e3, 2592000e3],
];

/** The round interval nearest to one in milliseconds. */
export function roundInterval(ms) {
  return ROUND.find(([below]) => ms < below)?.[1] ?? 31536000e3;
}

/** Milliseconds of a panel's or a target's own minimum (`15s`, `>15s`, `$__interval` counts as none), or undefined. */
function minimum(text) {
  const ms = duration(String(text ?? "").replace(/^>=?/, "").trim());
  return Number.isFinite(ms) && ms > 0 ? ms : undefined;
}

/**
 * Everything that one query needs to know about time.
 *
 * `range`: {from, to} in ms. `pixels`: the panel's width. `scrapeMs`: the data source's scrape interval.
 * Returns {interval, step, scrape, rateInterval, start, end} in ms; start and end lie on multiples of the step.
 */
export function timing({ range, pixels, scrapeMs, panel = {}, target = {} }) {
  const width = range.to - range.from;
  const points = Math.max(1, panel.maxDataPoints ?? Math.min(Math.max(Math.floor(pixels) || 500, 50), 2000));
  const least = minimum(panel.interval) ?? scrapeMs;
  const own = minimum(target.interval);
  const scrape = Math.round(own ?? minimum(panel.interval) ?? scrapeMs);
  // Whole milliseconds: Prometheus has no finer ones, and would step otherwise than is counted on here.
  let interval = Math.round(Math.max(roundInterval(width / points), least));
  interval = Math.max(interval, own ?? 0) * Math.max(1, target.intervalFactor ?? 1);
  const safe = width / MOST_POINTS;
  if (interval < safe) interval = Math.ceil(safe / 1000) * 1000;
  const step = interval;
  return {
    interval,
    step,
    scrape,
    rateInterval: Math.max(4 * scrape, step + scrape),
    start: Math.floor(range.from / step) * step,
    end: Math.floor(range.to / step) * step,
  };
}

/** The built-in variables of a query, by name. */
export function builtins(range, at) {
  return {
    __interval: durationText(at.interval),
    __interval_ms: String(at.interval),
    __rate_interval: durationText(at.rateInterval),
    ...ofRange(range),
  };
}

/** Those that the time range alone decides: all that the query of a variable may use. */
export function ofRange(range) {
  const seconds = Math.round((range.to - range.from) / 1000);
  return {
    __range: `${seconds}s`,
    __range_s: String(seconds),
    __range_ms: String(Math.round(range.to - range.from)),
    __from: String(Math.round(range.from)),
    __to: String(Math.round(range.to)),
  };
}
