/**
 * Reduces the values of a series to one number, by Grafana's names of calculations. Pure.
 */

const present = (values) => values.filter((value) => value !== null && value !== undefined && !Number.isNaN(value));

const CALCS = {
  lastNotNull: (values) => present(values).at(-1) ?? null,
  last: (values) => values.at(-1) ?? null,
  firstNotNull: (values) => present(values)[0] ?? null,
  first: (values) => values[0] ?? null,
  min: (values) => present(values).reduce((least, value) => (least === null || value < least ? value : least), null),
  max: (values) => present(values).reduce((most, value) => (most === null || value > most ? value : most), null),
  sum: (values) => (present(values).length ? present(values).reduce((total, value) => total + value, 0) : null),
  mean: (values) => (present(values).length ? CALCS.sum(values) / present(values).length : null),
  count: (values) => values.length,
  range: (values) => (present(values).length ? CALCS.max(values) - CALCS.min(values) : null),
  delta: (values) => present(values).reduce(([total, before], value) => [total + (before === null ? 0 : value >= before ? value - before : value), value], [0, null])[0],
  diff: (values) => (present(values).length ? present(values).at(-1) - present(values)[0] : null),
  median: (values) => percentile(present(values), 0.5),
  distinctCount: (values) => new Set(present(values)).size,
  changeCount: (values) => present(values).filter((value, index, all) => index && value !== all[index - 1]).length,
  allValues: (values) => values.join(", "),
  uniqueValues: (values) => [...new Set(present(values))].join(", "),
};

function percentile(values, share) {
  if (!values.length) return null;
  const sorted = [...values].sort((one, two) => one - two);
  return sorted[Math.round((sorted.length - 1) * share)];
}

const TITLES = { lastNotNull: "Last", last: "Last", firstNotNull: "First", first: "First", min: "Min", max: "Max", mean: "Mean", sum: "Total", count: "Count", range: "Range", delta: "Delta", diff: "Difference", median: "Median" };

/** One number of a series; null when it has none. */
export function reduce(values, calc = "lastNotNull") {
  const quantile = /^p(\d+)$/.exec(calc);
  if (quantile) return percentile(present(values), Number(quantile[1]) / 100);
  return (CALCS[calc] ?? CALCS.lastNotNull)(values);
}

/** What a calculation is called. */
export function calcTitle(calc) {
  return TITLES[calc] ?? calc;
}
