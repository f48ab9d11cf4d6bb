/** Text of a dashboard, as Markdown. */

import { h } from "./dom.js";
import { interpolateText } from "./interpolate.js";
import { fillAddress } from "./links.js";
import { markdown } from "./markdown.js";

/** Draws a `text` panel in its body. */
export class Text {
  constructor(body) {
    this.box = h("div", { class: "text-panel" });
    body.append(this.box);
  }

  /** Draw what was asked; see panel.js. Returns what was drawn. */
  draw({ panel, variables, range }) {
    const source = interpolateText(panel.options?.content ?? "", variables);
    this.box.replaceChildren(...markdown(source, (url) => fillAddress(url, { variables, range })));
    return { series: 0, points: 0, drawn: true };
  }

  /** Nothing to take away. */
  destroy() {}
}
