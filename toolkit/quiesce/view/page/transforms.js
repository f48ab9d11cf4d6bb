/**
 * Grafana's transformations that the dashboards use, on frames. Pure; a transformation that is not known throws.
 */

import { displayName, length } from "./frames.js";
import { calcTitle, reduce } from "./reduce.js";

const named = (name, type, values, config = {}) => ({ name, type, values, labels: {}, config });
const typeOf = (values) => (values.some((value) => typeof value === "number") ? "number" : "string");

function merge(frames) {
  if (frames.length < 2) return frames;
  const columns = [];
  for (const field of frames.flatMap((frame) => frame.fields)) if (!columns.some(({ name }) => name === field.name)) columns.push({ ...field, values: [] });
  const shared = columns.filter(({ name }) => frames.filter((frame) => frame.fields.some((field) => field.name === name)).length === frames.length).map(({ name }) => name);
  const rows = new Map();
  for (const frame of frames) {
    for (let index = 0; index < length(frame); index += 1) {
      const row = Object.fromEntries(frame.fields.map((field) => [field.name, field.values[index]]));
      const key = JSON.stringify(shared.map((name) => row[name] ?? null));
      const there = (rows.get(key) ?? []).find((other) => Object.entries(row).every(([name, value]) => !(name in other) || other[name] === value));
      if (there) Object.assign(there, row);
      else rows.set(key, [...(rows.get(key) ?? []), row]);
    }
  }
  const all = [...rows.values()].flat();
  return [{ refId: frames[0].refId, name: "merged", fields: columns.map((field) => ({ ...field, values: all.map((row) => row[field.name] ?? null) })) }];
}

function organize(frames, { excludeByName = {}, includeByName = {}, indexByName = {}, renameByName = {} }) {
  const included = Object.values(includeByName).some(Boolean);
  return frames.map((frame) => {
    const fields = frame.fields.filter((field) => !excludeByName[field.name] && (!included || includeByName[field.name]));
    const place = (field, index) => indexByName[field.name] ?? 1000 + index;
    const ordered = fields.map((field, index) => [place(field, index), field]).sort(([one], [two]) => one - two).map(([, field]) => field);
    return {
      ...frame,
      fields: ordered.map((field) => (renameByName[field.name] ? { ...field, name: renameByName[field.name], config: { ...field.config, displayNameFromDS: undefined } } : field)),
    };
  });
}

function labelsToFields(frames, { mode = "columns", keepLabels, valueLabel }) {
  return frames.map((frame) => {
    const rows = length(frame);
    const keys = [...new Set(frame.fields.flatMap((field) => Object.keys(field.labels)))].filter((key) => (!keepLabels?.length || keepLabels.includes(key)) && key !== "__name__");
    if (mode === "rows") {
      const pairs = frame.fields.flatMap((field) => Object.entries(field.labels));
      return { ...frame, fields: [named("label", "string", pairs.map(([key]) => key)), named("value", "string", pairs.map(([, value]) => value))] };
    }
    const of = (key) => frame.fields.find((field) => key in field.labels)?.labels[key];
    return {
      ...frame,
      fields: [
        ...frame.fields.filter((field) => field.type === "time"),
        ...keys.filter((key) => key !== valueLabel).map((key) => named(key, "string", new Array(rows).fill(of(key)))),
        ...frame.fields.filter((field) => field.type !== "time").map((field) => ({ ...field, name: field.labels[valueLabel] ?? field.name, labels: {}, config: {} })),
      ],
    };
  });
}

function sortBy(frames, { sort = [] }) {
  const [{ field: name, desc = false } = {}] = sort;
  if (!name) return frames;
  return frames.map((frame) => {
    const key = frame.fields.find((field) => field.name === name || displayName(field, frame) === name);
    if (!key) return frame;
    return take(frame, order(key.values, desc));
  });
}

/** Row numbers in the order of a column's values; empty ones last. */
export function order(values, desc) {
  const compare = (one, two) => (typeof one === "number" && typeof two === "number" ? one - two : String(one).localeCompare(String(two), "en", { numeric: true }));
  return values.map((_, index) => index).sort((one, two) => {
    const [a, b] = [values[one], values[two]];
    if (a === null || b === null) return (a === null) - (b === null) || one - two;
    return (desc ? compare(b, a) : compare(a, b)) || one - two;
  });
}

/** A frame with these rows. */
export function take(frame, rows) {
  return { ...frame, fields: frame.fields.map((field) => ({ ...field, values: rows.map((row) => field.values[row]) })) };
}

function joinByField(frames, { byField, mode = "outer" }) {
  const key = byField ?? "Time";
  const usable = frames.filter((frame) => frame.fields.some((field) => field.name === key));
  if (usable.length < 2) return frames;
  const indexes = usable.map((frame) => new Map(frame.fields.find((field) => field.name === key).values.map((value, index) => [value, index])));
  let keys = [...new Set(indexes.flatMap((index) => [...index.keys()]))];
  if (mode === "inner") keys = keys.filter((value) => indexes.every((index) => index.has(value)));
  const first = usable[0].fields.find((field) => field.name === key);
  if (first.type === "time") keys.sort((one, two) => one - two);
  const fields = [{ ...first, values: keys }];
  usable.forEach((frame, number) => {
    for (const field of frame.fields) if (field.name !== key) fields.push({ ...field, values: keys.map((value) => (indexes[number].has(value) ? field.values[indexes[number].get(value)] : null)) });
  });
  return [{ refId: usable[0].refId, name: "joined", fields }];
}

function reduceFrames(frames, { reducers = ["lastNotNull"], mode = "seriesToRows", includeTimeField = false, labelsToFields: labels = false }) {
  if (mode === "reduceFields") {
    return frames.map((frame) => ({
      ...frame,
      fields: frame.fields.filter((field) => field.type === "number" || (includeTimeField && field.type === "time"))
        .flatMap((field) => reducers.map((calc) => ({ ...field, name: reducers.length > 1 ? `${field.name} ${calcTitle(calc)}` : field.name, values: [reduce(field.values, calc)] }))),
    }));
  }
  const rows = frames.flatMap((frame) => frame.fields.filter((field) => field.type === "number").map((field) => ({ name: displayName(field, frame), field })));
  const keys = labels ? [...new Set(rows.flatMap(({ field }) => Object.keys(field.labels)))].filter((key) => key !== "__name__") : [];
  return [{
    refId: frames[0]?.refId,
    name: "reduced",
    fields: [
      ...(labels ? keys.map((key) => named(key, "string", rows.map(({ field }) => field.labels[key] ?? null))) : [named("Field", "string", rows.map(({ name }) => name))]),
      ...reducers.map((calc) => named(calcTitle(calc), "number", rows.map(({ field }) => reduce(field.values, calc)))),
    ],
  }];
}

function groupBy(frames, { fields: wanted = {} }) {
  return frames.map((frame) => {
    const keys = frame.fields.filter((field) => wanted[field.name]?.operation === "groupby");
    if (!keys.length) return frame;
    const groups = new Map();
    for (let index = 0; index < length(frame); index += 1) {
      const id = JSON.stringify(keys.map((field) => field.values[index]));
      groups.set(id, [...(groups.get(id) ?? []), index]);
    }
    const rows = [...groups.values()];
    const grouped = keys.map((field) => ({ ...field, values: rows.map(([first]) => field.values[first]) }));
    const sums = frame.fields.filter((field) => wanted[field.name]?.operation === "aggregate").flatMap((field) =>
      wanted[field.name].aggregations.map((calc) => {
        const values = rows.map((indexes) => reduce(indexes.map((index) => field.values[index]), calc));
        return { ...named(`${field.name} (${calc})`, typeOf(values), values), type: field.type === "time" ? "time" : typeOf(values) };
      }));
    return { ...frame, fields: [...grouped, ...sums] };
  });
}

const KNOWN = { merge, organize, labelsToFields, sortBy, joinByField, reduce: reduceFrames, groupBy, seriesToColumns: joinByField };

/** Apply a panel's transformations in order. */
export function transform(frames, transformations = []) {
  return transformations.filter((each) => !each.disabled).reduce((current, { id, options = {} }) => {
    if (!KNOWN[id]) throw new Error(`the transformation "${id}" is not known to this page`);
    return KNOWN[id](current, options);
  }, frames);
}
