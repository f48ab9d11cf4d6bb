/**
 * Annotations: events on the time axis that come from queries (alerts, saves, restores).
 */

import { sample } from "./frames.js";
import { interpolate, interpolateText } from "./interpolate.js";
import { builtins, timing } from "./intervals.js";
import { isOutdated } from "./requests.js";
import { duration } from "./timerange.js";

/** An annotation's query. */
export const expression = (definition) => definition.expr ?? definition.target?.expr ?? "";

/** The definitions that a page can show. */
export function usable(dashboard) {
  return (dashboard.annotations?.list ?? []).filter((each) => !each.builtIn && expression(each));
}

/** Events of one annotation's answer: {time, end, title, text, name, color} in ms. Adjacent samples are one region. */
export function events(definition, result, stepMs, variables = {}) {
  const found = [];
  const title = (labels) => filled(definition.titleFormat || definition.name, labels, variables);
  const text = (labels) => filled(definition.textFormat ?? "", labels, variables);
  for (const { metric, values } of result) {
    const common = { name: definition.name, color: definition.iconColor ?? "blue", title: title(metric), text: text(metric) };
    if (definition.useValueForTime) {
      for (const at of new Set(values.map(([, value]) => sample(value)))) if (at > 0) found.push({ ...common, time: at < 1e11 ? at * 1000 : at });
      continue;
    }
    let region = null;
    for (const [seconds, value] of values) {
      const at = seconds * 1000;
      if (!sample(value)) continue;
      if (region && at - (region.end ?? region.time) <= stepMs * 1.5) region.end = at;
      else found.push((region = { ...common, time: at }));
    }
  }
  return found.sort((one, two) => one.time - two.time);
}

function filled(format, labels, variables) {
  return interpolateText(format, variables).replace(/\{\{\s*([^}\s]+)\s*\}\}/g, (_, name) => labels[name] ?? "");
}

/** Fetch the events of all annotations that are switched on. One that fails is told by `onError` and left out. */
export async function fetchEvents(definitions, { server, range, variables, scrapeMs, signal, onError }) {
  const lists = await Promise.all(definitions.map(async (definition) => {
    const at = timing({ range, pixels: 600, scrapeMs, target: { interval: definition.step } });
    const step = Math.max(at.step, duration(definition.step) || 0);
    const query = interpolate(expression(definition), { ...variables, ...builtins(range, at) });
    try {
      const data = await server.prometheus("query_range", { query, start: String(at.start / 1000), end: String(at.end / 1000), step: String(step / 1000) }, { signal });
      return events(definition, data.result, step, variables).filter(({ time, end }) => (end ?? time) >= range.from && time <= range.to);
    } catch (error) {
      if (isOutdated(error)) throw error;
      onError?.(definition, error, query);
      return [];
    }
  }));
  return lists.flat();
}

/** Events that lie closer than `gapMs` are one mark that says how many it is. */
export function thin(all, gapMs) {
  const marks = [];
  for (const event of all) {
    const last = marks.at(-1);
    const joins = last && last.name === event.name && event.time - last.until < gapMs;
    if (!joins) { marks.push({ ...event, until: event.end ?? event.time, count: 1, titles: new Set([event.title]) }); continue; }
    last.until = Math.max(last.until, event.end ?? event.time);
    if (event.end) last.end = Math.max(last.end ?? last.time, event.end);
    last.count += 1;
    last.titles.add(event.title);
  }
  return marks;
}
