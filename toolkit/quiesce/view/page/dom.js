/**
 * Makes elements. Rule: text is always set as text, so nothing that Prometheus or a dashboard says is ever read as HTML.
 */

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) { if (key.startsWith("--")) element.style.setProperty(key, each); else element.style[key] = each; }
    else if (name === "data") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** An HTML element: `h("a", {href, onclick, style: {…}, data: {…}}, child, …)`. */
export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** A link that cannot run script: whatever is not http(s), a path of this server or a place in the page is only text. */
export function link(href, attributes, ...children) {
  if (!isSafe(href)) return h("span", attributes, ...children);
  const outside = /^https?:/i.test(href);
  return h("a", { href, ...(outside ? { target: "_blank", rel: "noopener noreferrer" } : {}), ...attributes }, ...children);
}

/** Whether an address may become a link. */
export function isSafe(href) {
  return /^(https?:\/\/|#|\/(?!\/))/i.test(String(href ?? "").trim());
}

/** Keep the focus in a group of elements to one tab stop; arrows, Home and End move it. */
export function roving(container, selector) {
  const items = () => [...container.querySelectorAll(selector)];
  const settle = () => items().forEach((item, index) => item.setAttribute("tabindex", index === 0 ? "0" : "-1"));
  settle();
  container.addEventListener("keydown", (event) => {
    const all = items();
    const at = all.indexOf(event.target.closest(selector));
    if (at < 0) return;
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: all.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const next = all[Math.max(0, Math.min(all.length - 1, to))];
    all.forEach((item) => item.setAttribute("tabindex", item === next ? "0" : "-1"));
    next.focus();
  });
}
