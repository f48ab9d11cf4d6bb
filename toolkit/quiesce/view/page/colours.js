/**
 * Grafana's names of colours as colours that people with any colour vision can tell apart, for both themes. Pure.
 *
 * The hues are those of Okabe and Ito's palette (red is vermilion, green is a bluish green), lightened on dark ground
 * and darkened on light ground until they have contrast. A colour given as #rrggbb is used as it is.
 */

const HUES = {
  dark: { green: "#2fbf95", red: "#f2603d", orange: "#f0a030", yellow: "#f2e05c", blue: "#5cb3f2", purple: "#d991c2", text: "#d5dae3", gray: "#8b93a3" },
  light: { green: "#00805d", red: "#c8401a", orange: "#b96f00", yellow: "#8f7a00", blue: "#0a6db5", purple: "#a3477f", text: "#1d2530", gray: "#6d7685" },
};

const PALETTE = {
  dark: ["#5cb3f2", "#f0a030", "#2fbf95", "#d991c2", "#f2e05c", "#f2603d", "#a9b4ff", "#9adbe8", "#c8a97e", "#b5bcc9"],
  light: ["#0a6db5", "#b96f00", "#00805d", "#a3477f", "#8f7a00", "#c8401a", "#5552c4", "#10808f", "#7b5a2d", "#5d6675"],
};

const SHADES = { dark: 0.62, "semi-dark": 0.8, light: 1.2, "super-light": 1.4 };

function shade(hex, factor) {
  const parts = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const mixed = parts.map((part) => Math.round(factor <= 1 ? part * factor : part + (255 - part) * (factor - 1)));
  return `#${mixed.map((part) => Math.min(255, part).toString(16).padStart(2, "0")).join("")}`;
}

/** A colour by Grafana's name (`semi-dark-red`), or as it was given. */
export function colour(name, theme = "dark") {
  if (!name) return HUES[theme].text;
  if (name === "transparent") return "transparent";
  const [, tone, hue] = /^(?:(dark|semi-dark|light|super-light)-)?([a-z]+)$/i.exec(name) ?? [];
  const known = HUES[theme][hue === "grey" ? "gray" : hue];
  if (!known) return name;
  return tone ? shade(known, SHADES[tone]) : known;
}

/** The colour of the n-th series. */
export function paletteColour(index, theme = "dark") {
  const all = PALETTE[theme];
  const base = all[index % all.length];
  const round = Math.floor(index / all.length);
  return round ? shade(base, round % 2 ? 0.7 : 1.3) : base;
}

/** A colour with less than full opacity. */
export function faded(hex, opacity) {
  const full = /^#([0-9a-f])([0-9a-f])([0-9a-f])$/i.test(hex) ? `#${[...hex.slice(1)].map((c) => c + c).join("")}` : hex;
  if (!/^#[0-9a-f]{6}$/i.test(full)) return opacity ? full : "transparent";
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(full.slice(at, at + 2), 16));
  return `rgba(${r},${g},${b},${opacity})`;
}

/** Black or white, whichever is read better on a ground. */
export function readableOn(hex) {
  if (!/^#[0-9a-f]{6}$/i.test(hex)) return "inherit";
  const light = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255).map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  const luminance = 0.2126 * light[0] + 0.7152 * light[1] + 0.0722 * light[2];
  return luminance > 0.18 ? "#10151c" : "#ffffff";
}

/** Scale of a heatmap, from few to many: viridis without its ends, readable in both themes and in grey. */
export function heatScale(theme) {
  const steps = ["#3b3a78", "#31688e", "#21918c", "#35b779", "#90d743", "#fde725"];
  const light = ["#cfe3ee", "#8fc3d6", "#4a9dbb", "#2b7497", "#2f4f86", "#33276b"];
  return (theme === "dark" ? steps : light).map((each, index, all) => [index / (all.length - 1), each]);
}
