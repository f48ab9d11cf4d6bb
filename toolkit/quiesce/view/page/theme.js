/**
 * Dark or light: the system's choice, unless the reader made one. Rule: colours are custom properties of the page; what
 * is drawn outside CSS asks for them here.
 */

const KEY = "quiesce-view-theme";
const dark = matchMedia("(prefers-color-scheme: dark)");
let tokens = null;

/** The theme that is on. */
export function theme() {
  return document.documentElement.dataset.theme;
}

/** A custom property of the page. */
export function token(name) {
  tokens ??= getComputedStyle(document.documentElement);
  return tokens.getPropertyValue(name).trim();
}

function stored() {
  try { return localStorage.getItem(KEY); } catch { return null; }
}

/** Set the theme: of the address, else of the reader's last choice, else of the system. Returns whether it changed. */
export function applyTheme(wanted) {
  const next = wanted ?? stored() ?? (dark.matches ? "dark" : "light");
  const changed = next !== document.documentElement.dataset.theme;
  document.documentElement.dataset.theme = next;
  return changed;
}

/** Remember a choice. */
export function rememberTheme(choice) {
  try { localStorage.setItem(KEY, choice); } catch { /* a browser that keeps nothing keeps the choice in the address */ }
}

/** Call back when the system changes its mind. */
export function onSystemTheme(call) {
  dark.addEventListener("change", call);
}
