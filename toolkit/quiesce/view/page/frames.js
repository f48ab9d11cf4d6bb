/**
 * Tables of named columns, the one shape of data that panels draw. Pure.
 *
 * A frame is {refId, name, fields}; a field is {name, type: "time" | "number" | "string", values, labels, config}.
 * Times are milliseconds. A missing value is null.
 */

import { interpolateText } from "./interpolate.js";

/** A sample's value: Prometheus sends text. */
export function sample(text) {
  return text === "+Inf" ? Infinity : text === "-Inf" ? -Infinity : text === "NaN" ? NaN : Number(text);
}

const hidden = ({ __name__: _, ...labels }) => labels;

function labelText(labels) {
  const pairs = Object.entries(hidden(labels)).map(([name, value]) => `${name}="${value}"`);
  return (labels.__name__ ?? "") + (pairs.length || !labels.__name__ ? `{${pairs.join(", ")}}` : "");
}

/** Names of series by a target's legend format; `__auto` names what tells them apart. */
export function legends(target, metrics, variables = {}) {
  const wanted = target.legendFormat;
  if (wanted && wanted !== "__auto") {
    return metrics.map((labels) => interpolateText(wanted, variables).replace(/\{\{\s*([^}\s]+)\s*\}\}/g, (_, name) => labels[name] ?? ""));
  }
  if (metrics.length === 1 && !Object.keys(hidden(metrics[0])).length) return [metrics[0].__name__ ?? target.expr ?? "value"];
  const names = [...new Set(metrics.flatMap((labels) => Object.keys(hidden(labels))))];
  const differing = names.filter((name) => new Set(metrics.map((labels) => labels[name])).size > 1);
  if (metrics.length > 1 && differing.length === 1) return metrics.map((labels) => labels[differing[0]] ?? "");
  return metrics.map(labelText);
}

/** Frames of a range query: one for each series, gaps as nulls where samples are missing from the grid of steps. */
export function fromMatrix(target, result, stepMs, variables) {
  const names = legends(target, result.map((each) => each.metric), variables);
  return result.map((series, index) => {
    const times = [];
    const values = [];
    let before = null;
    for (const [seconds, text] of series.values) {
      const at = Math.round(seconds * 1000);
      if (before !== null && at - before > stepMs * 1.5) { times.push(before + stepMs); values.push(null); }
      times.push(at);
      const value = sample(text);
      values.push(Number.isNaN(value) ? null : value);
      before = at;
    }
    return seriesFrame(target.refId, names[index], series.metric, times, values);
  });
}

function seriesFrame(refId, name, labels, times, values) {
  return {
    refId,
    name,
    fields: [
      { name: "Time", type: "time", values: times, labels: {}, config: {} },
      { name: "Value", type: "number", values, labels, config: { displayNameFromDS: name } },
    ],
  };
}

/** Frames of an instant query that is drawn as series: one sample each. */
export function fromVector(target, result, variables) {
  const names = legends(target, result.map((each) => each.metric), variables);
  return result.map(({ metric, value }, index) => seriesFrame(target.refId, names[index], metric, [Math.round(value[0] * 1000)], [sample(value[1])]));
}

/** One frame of an instant query that is drawn as a table: a column for each label, and the value. */
export function tableOf(target, result, several) {
  const names = [...new Set(result.flatMap((each) => Object.keys(each.metric)))].sort();
  const value = several ? `Value #${target.refId}` : "Value";
  const column = (name, type, of) => ({ name, type, values: result.map(of), labels: {}, config: {} });
  return {
    refId: target.refId,
    name: target.refId,
    fields: [
      column("Time", "time", (each) => Math.round((each.value ?? each.values.at(-1))[0] * 1000)),
      ...names.map((name) => column(name, "string", (each) => each.metric[name] ?? null)),
      column(value, "number", (each) => sample((each.value ?? each.values.at(-1))[1])),
    ],
  };
}

/** One table of a range query: every sample of every series. */
export function longTable(target, result, several) {
  const rows = result.flatMap(({ metric, values }) => values.map((value) => ({ metric, value })));
  return tableOf(target, rows, several);
}

/** What Prometheus answered, as frames. `data` is {resultType, result}. */
export function toFrames(target, data, { stepMs, variables = {}, several = false }) {
  const { resultType: type, result } = data;
  if (type === "scalar" || type === "string") return fromVector(target, [{ metric: {}, value: result }], variables);
  if (target.format === "table") return type === "matrix" ? [longTable(target, result, several)] : [tableOf(target, result, several)];
  return type === "matrix" ? fromMatrix(target, result, stepMs, variables) : fromVector(target, result, variables);
}

/** Number of rows of a frame. */
export function length(frame) {
  return frame.fields[0]?.values.length ?? 0;
}

/** What a field is called for people. */
export function displayName(field, frame, { single = false } = {}) {
  const own = field.config.displayName;
  if (own) return own;
  return field.config.displayNameFromDS || (single ? frame?.name : undefined) || field.name;
}

/** The fields with numbers of all frames, each with its frame and the times beside it. */
export function numbers(frames) {
  return frames.flatMap((frame) => {
    const time = frame.fields.find((field) => field.type === "time");
    return frame.fields.filter((field) => field.type === "number").map((field) => ({ frame, field, times: time?.values ?? [] }));
  });
}

/** Cumulative buckets by `le` as single ones: {bounds: ["0.1", …, "+Inf"], times, counts: rows by bucket}, smallest first. */
export function buckets(frames) {
  const series = numbers(frames)
    .map(({ field, times, frame }) => ({ le: field.labels.le ?? frame.name, times, values: field.values }))
    .filter(({ le }) => !Number.isNaN(sample(le)))
    .sort((one, two) => sample(one.le) - sample(two.le));
  const times = [...new Set(series.flatMap((each) => each.times))].sort((one, two) => one - two);
  const place = new Map(times.map((at, index) => [at, index]));
  const bounds = [];
  const totals = [];
  for (const each of series) {
    let row = totals[bounds.indexOf(each.le)];
    if (!row) { row = new Array(times.length).fill(null); bounds.push(each.le); totals.push(row); }
    each.times.forEach((at, index) => {
      const value = each.values[index];
      if (value !== null) row[place.get(at)] = (row[place.get(at)] ?? 0) + value;
    });
  }
  const counts = totals.map((row, index) => row.map((value, at) => (value === null ? null : Math.max(0, value - (index ? totals[index - 1][at] ?? 0 : 0)))));
  return { bounds, times, counts };
}
