/**
 * What a panel's JSON says of each field: unit, thresholds, mappings, colour, links. Pure.
 *
 * Rule: defaults first, then overrides in order, as Grafana applies them.
 */

import { colour, paletteColour } from "./colours.js";
import { displayName } from "./frames.js";
import { isMoment, format } from "./units.js";

function put(config, id, value) {
  if (id.startsWith("custom.")) {
    const path = id.slice(7).split(".");
    config.custom = structuredClone(config.custom ?? {});
    let at = config.custom;
    for (const key of path.slice(0, -1)) at = at[key] ??= {};
    at[path.at(-1)] = value;
  } else config[id] = value;
}

function pattern(text) {
  const parts = /^\/(.*)\/([a-z]*)$/s.exec(text);
  return parts ? new RegExp(parts[1], parts[2]) : new RegExp(`^(?:${text})$`);
}

function matches({ id, options }, field, frame) {
  const name = displayName(field, frame);
  if (id === "byName") return name === options || field.name === options;
  if (id === "byRegexp") return pattern(options).test(name);
  if (id === "byNames") return (options.names ?? []).includes(name) !== (options.mode === "exclude");
  if (id === "byFrameRefID" || id === "byRefId") return frame.refId === options;
  if (id === "byType") return field.type === options;
  return false;
}

/** Set the configuration of every field of the frames. */
export function configure(frames, { defaults = {}, overrides = [] } = {}) {
  for (const frame of frames) {
    for (const field of frame.fields) {
      const config = { ...field.config };
      for (const [key, value] of Object.entries(defaults)) if (value !== null && value !== undefined) config[key] = value;
      field.config = config;
      for (const { matcher, properties } of overrides) {
        if (matches(matcher, field, frame)) for (const { id, value } of properties) put(config, id, value);
      }
    }
  }
  return frames;
}

/** The threshold step that a value lies in; the first step of all reaches down to minus infinity. */
export function thresholdOf(value, config) {
  const steps = config.thresholds?.steps ?? [];
  let measured = value;
  if (config.thresholds?.mode === "percentage") {
    const [low, high] = [config.min ?? 0, config.max ?? 100];
    measured = ((value - low) / (high - low)) * 100;
  }
  let found = steps[0];
  for (const step of steps) if (step.value === null || step.value === undefined || step.value === "null" || measured >= step.value) found = step;
  return found;
}

/** Thresholds with their values as numbers, in the unit of the field. */
export function thresholdLines(config) {
  const steps = config.thresholds?.steps ?? [];
  const numeric = steps.filter((step) => typeof step.value === "number");
  if (config.thresholds?.mode !== "percentage") return numeric;
  const [low, high] = [config.min ?? 0, config.max ?? 100];
  return numeric.map((step) => ({ ...step, value: low + ((high - low) * step.value) / 100 }));
}

function mapped(value, mappings = []) {
  for (const { type, options = {} } of mappings) {
    if (type === "value") {
      const found = options[String(value)];
      if (found && value !== null) return found;
    } else if (type === "range") {
      const { from, to, result } = options;
      if (typeof value === "number" && value >= (from ?? -Infinity) && value <= (to ?? Infinity)) return result;
    } else if (type === "regex") {
      const regex = pattern(options.pattern ?? "");
      if (value !== null && value !== undefined && regex.test(String(value))) return { ...options.result, text: options.result.text === undefined ? undefined : String(value).replace(regex, options.result.text) };
    } else if (type === "special") {
      const empty = value === null || value === undefined;
      const nan = Number.isNaN(value);
      const is = { null: empty, nan, "null+nan": empty || nan, empty: value === "", true: value === true, false: value === false }[options.match];
      if (is) return options.result;
    }
  }
  return null;
}

/** A value as it is shown: {text, colour, mapped, name of the colour}. `index` is the series' place, for palettes. */
export function display(value, config, theme, { now = Date.now(), index = 0 } = {}) {
  const mapping = mapped(value, config.mappings);
  const missing = value === null || value === undefined || (typeof value === "number" && Number.isNaN(value) && !mapping);
  const text = mapping?.text || (missing ? config.noValue ?? "–" : format(value, config.unit, config.decimals, now));
  const named = mapping?.color ?? (missing ? undefined : colourName(value, config));
  return { text, mapped: Boolean(mapping), missing, colourName: named, colour: named ? colour(named, theme) : missing ? colour("gray", theme) : paletteColour(index, theme) };
}

function colourName(value, config) {
  const mode = config.color?.mode ?? "thresholds";
  if (mode === "fixed") return config.color.fixedColor;
  if (mode === "thresholds" && typeof value === "number") return thresholdOf(value, config)?.color;
  return undefined;
}

/** The colour of a whole series. */
export function seriesColour(field, index, theme) {
  const { mode, fixedColor, seriesBy = "last" } = field.config.color ?? {};
  if (mode === "fixed" || mode === "shades") return colour(fixedColor, theme);
  if (mode === "thresholds") {
    const values = field.values.filter((value) => value !== null);
    const value = seriesBy === "max" ? Math.max(...values) : seriesBy === "min" ? Math.min(...values) : values.at(-1);
    return colour(thresholdOf(value ?? 0, field.config)?.color, theme);
  }
  return paletteColour(index, theme);
}

/** Text of a table's cell or a tooltip: times without a unit are moments. */
export function cellText(field, value, theme, now) {
  if (field.type === "time" && !field.config.unit) return value === null ? "" : format(value, "dateTimeAsIso");
  return display(value, field.config, theme, { now }).text;
}

/** Whether a field's numbers are points in time. */
export function isTime(field) {
  return field.type === "time" || isMoment(field.config.unit);
}
