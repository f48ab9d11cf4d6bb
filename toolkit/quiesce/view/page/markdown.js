/**
 * Markdown of text panels and descriptions as elements. Rule: everything becomes a text node or one of a few plain
 * elements; HTML in the source is shown as text.
 */

import { h, link } from "./dom.js";

const INLINE = /(`[^`]+`)|(\*\*[^*]+\*\*|__[^_]+__)|(\*[^*\s][^*]*\*|_[^_\s][^_]*_(?!\w))|\[([^\]]+)\]\(([^)\s]+)\)/;

/** Inline markup as a list of nodes. `address` turns an address into one of this page. */
export function inline(text, address = (url) => url) {
  const nodes = [];
  let rest = text;
  for (let match = INLINE.exec(rest); match; match = INLINE.exec(rest)) {
    if (match.index) nodes.push(rest.slice(0, match.index));
    const [whole, code, bold, italic, label, url] = match;
    if (code) nodes.push(h("code", {}, code.slice(1, -1)));
    else if (bold) nodes.push(h("strong", {}, ...inline(bold.slice(2, -2), address)));
    else if (italic) nodes.push(h("em", {}, ...inline(italic.slice(1, -1), address)));
    else nodes.push(link(address(url), {}, ...inline(label, address)));
    rest = rest.slice(match.index + whole.length);
  }
  if (rest) nodes.push(rest);
  return nodes;
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());

/** A whole text as a list of block elements. */
export function markdown(source, address) {
  const blocks = [];
  const lines = String(source ?? "").split("\n");
  for (let at = 0; at < lines.length; at += 1) {
    const line = lines[at];
    if (!line.trim()) continue;
    const heading = /^(#{1,6})\s+(.*)$/.exec(line);
    if (heading) { blocks.push(h(`h${Math.min(6, heading[1].length + 2)}`, {}, ...inline(heading[2], address))); continue; }
    if (/^```/.test(line)) {
      const code = [];
      for (at += 1; at < lines.length && !/^```/.test(lines[at]); at += 1) code.push(lines[at]);
      blocks.push(h("pre", {}, h("code", {}, code.join("\n"))));
      continue;
    }
    if (/^\s*([-*+]|\d+\.)\s+/.test(line)) {
      const items = [];
      for (; at < lines.length && lines[at].trim(); at += 1) {
        if (/^\s*([-*+]|\d+\.)\s+/.test(lines[at])) items.push(lines[at].replace(/^\s*([-*+]|\d+\.)\s+/, ""));
        else items.push(`${items.pop()} ${lines[at].trim()}`);
      }
      blocks.push(h(/^\s*\d/.test(line) ? "ol" : "ul", {}, ...items.map((item) => h("li", {}, ...inline(item, address)))));
      continue;
    }
    if (/^\s*\|/.test(line) && /^\s*\|?[\s:|-]+\|[\s:|-]*$/.test(lines[at + 1] ?? "")) {
      const head = cells(line);
      const rows = [];
      for (at += 2; at < lines.length && /^\s*\|/.test(lines[at]); at += 1) rows.push(cells(lines[at]));
      at -= 1;
      blocks.push(h("table", { class: "grid-table" }, h("thead", {}, h("tr", {}, ...head.map((cell) => h("th", { scope: "col" }, ...inline(cell, address))))), h("tbody", {}, ...rows.map((row) => h("tr", {}, ...row.map((cell) => h("td", {}, ...inline(cell, address))))))));
      continue;
    }
    const paragraph = [];
    for (; at < lines.length && lines[at].trim() && !/^(#{1,6}\s|```|\s*[-*+]\s|\s*\d+\.\s)/.test(lines[at]); at += 1) paragraph.push(lines[at].trim());
    at -= 1;
    blocks.push(h("p", {}, ...inline(paragraph.join(" "), address)));
  }
  return blocks;
}
