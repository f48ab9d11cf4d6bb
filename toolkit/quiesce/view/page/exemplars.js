/** Exemplars: single measurements that know their trace. Pure, but for asking. */

import { clock } from "./timerange.js";

const MOST = 60;

/** Of many exemplars, at most `most`: the largest of each stretch of time, so that the slow ones stay. */
export function chosen(all, range, most = MOST) {
  const inside = all.filter(({ time }) => time >= range.from && time <= range.to);
  if (inside.length <= most) return inside;
  const width = (range.to - range.from) / (most / 2);
  const cells = new Map();
  for (const each of inside) {
    const key = Math.floor((each.time - range.from) / width);
    cells.set(key, [...(cells.get(key) ?? []), each]);
  }
  return [...cells.values()].flatMap((cell) => cell.sort((one, two) => two.value - one.value).slice(0, 2)).sort((one, two) => one.time - two.time);
}

/** What `query_exemplars` answered, as a list of {time, value, traceId, href, about, labels}; each trace once. */
export function read(data, tint) {
  const seen = new Set();
  return (data ?? []).flatMap(({ seriesLabels, exemplars }) => exemplars.map((each) => ({ seriesLabels, ...each })))
    .map(({ seriesLabels, labels, value, timestamp }) => ({ time: Math.round(timestamp * 1000), value: Number(value), traceId: labels.trace_id ?? labels.traceID ?? "", labels: { ...seriesLabels, ...labels } }))
    .filter((each) => each.traceId && Number.isFinite(each.value) && !seen.has(`${each.traceId} ${each.time} ${each.value}`) && seen.add(`${each.traceId} ${each.time} ${each.value}`))
    .map((each) => {
      const what = ["kind", "phase", "outcome", "run"].map((key) => each.labels[key]).filter(Boolean).join(", ");
      return { ...each, href: `#/trace/${each.traceId}`, colour: tint, about: `at ${clock(each.time)}${what ? ` (${what})` : ""}: open trace ${each.traceId.slice(0, 8)}` };
    })
    .sort((one, two) => one.time - two.time);
}
